package mountns

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/test/require"
)

func TestParse(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]Mount{
		`36 35 98:0 /root /mnt\040one rw,noatime master:1 shared:2 - ext3 /dev/loop7 rw,errors=continue`: {"/mnt one", "/dev/loop7"},
		`36 35 0:20 / /proc rw - proc proc rw`: {"/proc", "proc"},
		`36 35 0:20 / /a\134b rw -`:            {`/a\b`, ""},
		`36 35 0:20 /`:                         {},
	} {
		if got, ok := parse(line); got != want || ok != (want != Mount{}) {
			t.Errorf("%q: %+v, %v", line, got, ok)
		}
	}
}

// TestDetach: a foreign mount, and what is mounted in it, is gone from the thread's namespace and stays on the host.
func TestDetach(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir := t.TempDir()
	foreign, ours := filepath.Join(dir, "foreign one"), filepath.Join(dir, "ours")
	inside := filepath.Join(foreign, "inside")
	for _, point := range []string{foreign, inside, ours} {
		if err := os.Mkdir(point, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("test", point, "tmpfs", 0, "size=64k"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(point, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
	}
	mounted := func() (list string) {
		b, err := os.ReadFile("/proc/thread-self/mountinfo")
		if err != nil {
			t.Error(err)
		}
		for line := range strings.Lines(string(b)) {
			if m, _ := parse(line); Within(m.Point, dir) {
				list += " " + strings.TrimPrefix(m.Point, dir)
			}
		}
		return list
	}
	if err := osthread.Do(func() error {
		if err := Enter(); err != nil {
			return err
		}
		if err := Detach(func(m Mount) bool { return Within(m.Point, foreign) }); err != nil {
			return err
		}
		if got := mounted(); got != " /ours" {
			t.Errorf("the namespace has%s", got)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if got := mounted(); got != " /foreign one /foreign one/inside /ours" {
		t.Errorf("the host has%s", got)
	}
}
