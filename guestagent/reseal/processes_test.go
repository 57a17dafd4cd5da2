//go:build linux

package reseal

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// TestIsGo: programs that Go's linker made are known, with a build id and without.
func TestIsGo(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	source := filepath.Join(dir, "main.go") // a small one: the third build compiles all packages again, the runtime's among them
	if err := os.WriteFile(source, []byte("package main\n\nfunc main() { println(1) }\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, flags := range map[string][]string{
		"with a build id": {"-ldflags=-s -w"}, "without": {"-ldflags=-s -w -buildid="}, "at any address": {"-ldflags=-s -w -buildid=", "-buildmode=pie"},
	} {
		file := filepath.Join(dir, name)
		args := append([]string{"build", "-trimpath", "-o", file}, flags...)
		cmd := exec.CommandContext(t.Context(), "go", append(args, source)...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if !isGo(file) {
			t.Errorf("a program of Go %s is not known", name)
		}
	}
	if isGo("/bin/sh") {
		t.Error("/bin/sh counts as a program of Go")
	}
}

// TestWritableSegments: no file, however it begins, is read beyond its head.
func TestWritableSegments(t *testing.T) {
	t.Parallel()
	head := make([]byte, 4096)
	copy(head, "\x7fELF\x02\x01")
	head[54], head[56] = 56, 1
	for what, change := range map[string]func([]byte){
		"no header of a segment": func(b []byte) { b[56] = 0 },
		"headers beyond the end": func(b []byte) { b[33] = 16 },
		"headers at the end":     func(b []byte) { b[32], b[33] = 0xf0, 15 },
		"headers far away":       func(b []byte) { copy(b[32:], "\xff\xff\xff\xff\xff\xff\xff\xff") },
		"a negative offset":      func(b []byte) { b[32], b[64], b[68], b[79] = 64, 1, 2, 0x80 },
		"many headers":           func(b []byte) { b[32], b[56], b[57] = 64, 0xff, 0xff },
	} {
		b := slices.Clone(head)
		change(b)
		if got := writableSegments(b, nil); len(got) > 0 {
			t.Errorf("%s: segments at %d", what, got)
		}
	}
	head[32], head[56] = 64, 8
	for i := range 8 {
		h := head[64+56*i:]
		h[0], h[4], h[8] = 1, 2, byte(i)
	}
	if got := writableSegments(head, nil); !slices.Equal(got, []int64{0, 1, 2, 3}) {
		t.Errorf("eight segments: %d", got)
	}
	for n := range 64 {
		if got := writableSegments(head[:n], nil); len(got) > 0 {
			t.Errorf("%d bytes have the segments %d", n, got)
		}
	}
}
