// Package ext4test makes the disks that tests of package ext4 and of its users read: with mkfs.ext4, formatted as package images
// does, and changed by debugfs. Neither mounts anything, and neither needs root.
package ext4test

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/images/build"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// Make makes a disk of size bytes in a new file, with the content of the directory from unless that is "".
func Make(tb testing.TB, path string, size int64, from string) {
	tb.Helper()
	mkfs := require.Program(tb, "mkfs.ext4", "e2fsprogs")
	f, err := os.Create(path)
	if err != nil {
		tb.Fatal(err)
	}
	if err := f.Truncate(size); err != nil {
		tb.Fatal(err)
	}
	if err := f.Close(); err != nil {
		tb.Fatal(err)
	}
	args := build.OverlayArgs()
	if from != "" {
		args = append(args, "-d", from)
	}
	cmd := exec.CommandContext(tb.Context(), mkfs, append(args, path)...) //nolint:gosec // G204: a test's own
	cmd.Env = append(os.Environ(), "MKE2FS_CONFIG=/dev/null")
	if out, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
}

// Change runs commands of debugfs on a disk.
func Change(tb testing.TB, path string, commands ...string) {
	tb.Helper()
	debugfs := require.Program(tb, "debugfs", "e2fsprogs")
	cmd := exec.CommandContext(tb.Context(), debugfs, "-w", "-f", "-", path)                         //nolint:gosec // G204: a test's own
	cmd.Env = append(os.Environ(), "E2FSPROGS_FAKE_TIME=1000000000", "SOURCE_DATE_EPOCH=1000000000") // what it makes is as old as that
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = nil, &said // what it answers goes to its standard output, what it dislikes to the other
	err := cmd.Run()
	complaints := strings.Split(strings.TrimSpace(said.String()), "\n")[1:] // the first line is its version
	if err != nil || len(complaints) > 0 {
		tb.Fatalf("debugfs: %v: %s", err, strings.Join(complaints, "\n"))
	}
}

//go:embed tiny.ext4.gz
var tiny []byte

// Tiny returns a disk of 64 blocks of 4 KiB, written by mkfs.ext4 and debugfs: upper/ with a, b, d/1 to d/4, two links and a whiteout.
func Tiny(tb testing.TB) []byte {
	tb.Helper()
	z, err := gzip.NewReader(bytes.NewReader(tiny))
	if err != nil {
		tb.Fatal(err)
	}
	b, err := io.ReadAll(z)
	if err != nil {
		tb.Fatal(err)
	}
	return b
}
