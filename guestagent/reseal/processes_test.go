//go:build linux

package reseal

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestIsGo: programs that Go's linker made are known, with a build id and without.
func TestIsGo(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, flags := range map[string]string{"with a build id": "-s -w", "without": "-s -w -buildid="} {
		file := filepath.Join(dir, name)
		cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags", flags, "-o", file, "github.com/coppice-dev/coppice/cmd/coppice-guest")
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

// TestWritableSegment: no file, however it begins, is read beyond its head.
func TestWritableSegment(t *testing.T) {
	t.Parallel()
	head := make([]byte, 4096)
	copy(head, "\x7fELF\x02\x01")
	head[54], head[56] = 56, 1
	for what, change := range map[string]func([]byte){
		"no header of a segment": func(b []byte) { b[56] = 0 },
		"headers beyond the end": func(b []byte) { b[33] = 16 },
		"headers before the end": func(b []byte) { b[32], b[33] = 0xf0, 15 },
		"headers far away":       func(b []byte) { copy(b[32:], "\xff\xff\xff\xff\xff\xff\xff\xff") },
		"a negative offset":      func(b []byte) { b[32], b[64], b[68], b[79] = 64, 1, 2, 0x80 },
		"many headers":           func(b []byte) { b[32], b[56], b[57] = 64, 0xff, 0xff },
	} {
		b := append([]byte(nil), head...)
		change(b)
		if at, ok := writableSegment(b); ok {
			t.Errorf("%s: the segment is at %d", what, at)
		}
	}
	head[32], head[64], head[68], head[72] = 64, 1, 2, 9
	if at, ok := writableSegment(head); !ok || at != 9 {
		t.Errorf("the segment is at %d, %v, want 9", at, ok)
	}
	for n := range 64 {
		if _, ok := writableSegment(head[:n]); ok {
			t.Errorf("%d bytes have a segment", n)
		}
	}
}
