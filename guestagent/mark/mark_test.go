//go:build linux

package mark

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// guest is a guest with one file system in memory, on a disk of this machine.
func guest(t *testing.T, kind string) (Guest, string) {
	t.Helper()
	root := t.TempDir()
	at := filepath.Join(root, "mem")
	proc := filepath.Join(root, "proc")
	for _, dir := range []string{at, filepath.Join(proc, "1")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	info := "22 1 0:20 / /proc rw - proc proc rw\n" + fmt.Sprintf("23 1 0:21 / /mem rw,nosuid - %s mem rw\n", kind)
	if err := os.WriteFile(filepath.Join(proc, "1", "mountinfo"), []byte(info), 0o600); err != nil {
		t.Fatal(err)
	}
	return Guest{Root: root, Proc: proc, Disk: root, PIDs: func() ([]int, error) { return nil, nil }}, at
}

// sums is a mark without the disk: the disk of the machine that runs the test is in use.
func (g Guest) sums(t *testing.T) string {
	t.Helper()
	s, err := g.make(g.idle, g.mounts)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestMark(t *testing.T) {
	t.Parallel()
	g, at := guest(t, "tmpfs")
	file := filepath.Join(at, "dir", "file")
	old := time.Unix(1, 0)
	last := g.sums(t)
	if last == "" || g.sums(t) != last {
		t.Fatal("two marks of a guest that did not change differ")
	}
	for _, change := range []struct {
		name string
		do   func() error
	}{
		{"a new directory", func() error { return os.Mkdir(filepath.Dir(file), 0o755) }},
		{"a new file", func() error { return os.WriteFile(file, []byte("one"), 0o600) }},
		{"other content of the same length", func() error {
			if err := os.WriteFile(file, []byte("two"), 0o600); err != nil {
				return err
			}
			return os.Chtimes(file, old, old) // as a program that hides its change would; the time of the inode's change stays
		}},
		{"another mode", func() error { return os.Chmod(file, 0o640) }},
		{"a link", func() error { return os.Symlink("file", file+"2") }},
		{"a removal", func() error { return os.Remove(file + "2") }},
		{"another mount", func() error {
			return os.WriteFile(filepath.Join(g.Proc, "1", "mountinfo"), []byte("23 1 0:21 / /mem rw - tmpfs mem rw\n"), 0o600)
		}},
	} {
		if err := change.do(); err != nil {
			t.Fatal(err)
		}
		now := g.sums(t)
		if now == last || now == "" {
			t.Errorf("%s is not noticed", change.name)
		}
		last = now
	}
}

// TestNoMark: where something may change unseen, there is no mark.
func TestNoMark(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"fuse.sshfs", "nfs4", "xfs", "ext4"} {
		if g, _ := guest(t, kind); g.sums(t) != "" {
			t.Errorf("a guest with a mount of the type %s has a mark", kind)
		}
	}
	g, at := guest(t, "tmpfs")
	g.PIDs = func() ([]int, error) { return []int{7}, nil }
	if g.sums(t) != "" {
		t.Error("a guest in which a program runs has a mark")
	}
	g.PIDs = func() ([]int, error) { return nil, nil }
	for i := range maxFiles {
		if err := os.WriteFile(filepath.Join(at, fmt.Sprint(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if g.sums(t) != "" {
		t.Error("a guest with too many files in memory has a mark")
	}
}

// TestDiskMark: a directory that is not on a disk has no mark. TestVM/mark in runner/guest has a real disk.
func TestDiskMark(t *testing.T) {
	t.Parallel()
	g := Guest{Disk: "/dev/shm"}
	if s, err := g.make(g.disk); s != "" || err != nil {
		t.Errorf("%q, %v", s, err)
	}
}
