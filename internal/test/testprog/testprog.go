// Package testprog writes programs that tests run.
package testprog

import (
	"os"
	"syscall"
	"testing"
)

// Write makes a file that can be run at once. While another goroutine starts a process, that process has a copy of every descriptor
// until it has become its program; if one of them writes the file, running it fails with "text file busy". So nothing is started
// meanwhile.
func Write(tb testing.TB, path string, content []byte) {
	tb.Helper()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := os.WriteFile(path, content, 0o755); err != nil { //nolint:gosec // G306: a program
		tb.Fatal(err)
	}
}
