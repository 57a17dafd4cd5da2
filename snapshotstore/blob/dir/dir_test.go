package dir

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/blobtest"
)

const writerEnv = "DIR_TEST_STORE" // makes the test binary put objects into this directory for ever

func TestMain(m *testing.M) {
	if path := os.Getenv(writerEnv); path != "" {
		putForEver(path)
	}
	testleak.Main(m)
}

func open(tb testing.TB) *Store {
	tb.Helper()
	s, err := Open(filepath.Join(tb.TempDir(), "store"))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Close(); err != nil {
			tb.Error(err)
		}
	})
	return s
}

func TestSuite(t *testing.T) {
	t.Parallel()
	blobtest.Run(t, func(tb testing.TB) blobtest.Store {
		tb.Helper()
		s := open(tb)
		return blobtest.Store{
			Blobs: s,
			Abandon: func(tb testing.TB, key string) {
				tb.Helper()
				data := blobtest.Bytes(1, 1000)
				if _, err := s.write(tb.Context(), key, bytes.NewReader(data), int64(len(data)), core.DigestOf(data)); err != nil {
					tb.Fatal(err)
				}
			},
			Leftovers: func(tb testing.TB) int {
				tb.Helper()
				names, err := s.names(temporary)
				if err != nil {
					tb.Fatal(err)
				}
				return len(names)
			},
		}
	})
}

func TestModes(t *testing.T) {
	t.Parallel()
	s := open(t)
	put(t, s, "a/b", "x")
	err := filepath.WalkDir(s.path, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if want := map[bool]fs.FileMode{true: 0o700, false: 0o600}[e.IsDir()]; err != nil || info.Mode().Perm() != want {
			t.Errorf("%s has mode %v, %v; want %v", path, info.Mode(), err, want)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func put(t *testing.T, s *Store, key, data string) {
	t.Helper()
	if err := blobtest.Put(t.Context(), s, key, []byte(data)); err != nil {
		t.Fatal(err)
	}
}

// TestLinks puts symbolic links in the places of objects and their directories.
func TestLinks(t *testing.T) {
	t.Parallel()
	s, outside := open(t), t.TempDir()
	put(t, s, "real/object", "x")
	target := filepath.Join(outside, "target")
	if err := os.WriteFile(target, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{"out": outside, "file": target, "up": "..", "in": "real/object"} {
		if err := os.Symlink(to, filepath.Join(s.path, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, key := range []string{"out/target", "file", "up/store/real/object", "in"} {
		if got, err := blobtest.Get(t.Context(), s, key, 0, 10); err == nil {
			t.Errorf("%s: read %q through a link", key, got)
		}
		if err := blobtest.Put(t.Context(), s, key, []byte("y")); err == nil {
			t.Errorf("%s: written through a link", key)
		}
		if err := s.Delete(t.Context(), key); err != nil && core.CodeOf(err) != core.CodeStoreUnavailable {
			t.Errorf("%s: %v", key, err)
		}
	}
	if err := blobtest.Put(t.Context(), s, "out/new", []byte("y")); core.CodeOf(err) != core.CodeStoreUnavailable {
		t.Errorf("a new object through a link: %v", err)
	}
	if got := blobtest.Keys(t, s, ""); len(got) != 1 || got[0] != "real/object" {
		t.Errorf("listed: %q", got)
	}
	if got, err := os.ReadFile(target); err != nil || string(got) != "secret" {
		t.Errorf("the file outside holds %q, %v", got, err)
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) != 1 {
		t.Errorf("outside are %v, %v", entries, err)
	}
}

func TestKeyBelowAnObject(t *testing.T) {
	t.Parallel()
	s := open(t)
	put(t, s, "a", "x")
	if err := blobtest.Put(t.Context(), s, "a/b", []byte("y")); core.CategoryOf(err) != core.Invalid {
		t.Errorf("got %v, want a refusal", err)
	}
	put(t, s, "c/d", "x")
	if err := blobtest.Put(t.Context(), s, "c", []byte("y")); core.CodeOf(err) != core.CodeStoreUnavailable {
		t.Errorf("got %v, want that something is in its place", err)
	}
}

func TestEmptyDirectoriesGo(t *testing.T) {
	t.Parallel()
	s := open(t)
	for _, key := range []string{"a/b/c", "a/b/d", "a/e"} {
		put(t, s, key, "x")
	}
	for _, c := range []struct{ delete, gone, left string }{{"a/b/c", "a/b/c", "a/b"}, {"a/b/d", "a/b", "a"}, {"a/e", "a", "."}} {
		if err := s.Delete(t.Context(), c.delete); err != nil {
			t.Error(err)
		}
		if _, err := s.root.Stat(c.gone); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is there: %v", c.gone, err)
		}
		if _, err := s.root.Stat(c.left); err != nil {
			t.Error(err)
		}
	}
}

func TestOpen(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	file := filepath.Join(base, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]core.Category{
		"":                                 core.Invalid,
		"relative":                         core.Invalid,
		filepath.Join(base, "absent", "s"): core.Unavailable,
		file:                               core.Unavailable,
	} {
		if s, err := Open(path); core.CategoryOf(err) != want {
			t.Errorf("%q: got %v, %v; want %s", path, s, err, want)
		}
	}
	for range 2 { // the second one finds the object of the first
		s, err := Open(base)
		if err != nil {
			t.Fatal(err)
		}
		put(t, s, "a", "x")
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestFileCutShort: a file becomes shorter after a reader has opened it.
func TestFileCutShort(t *testing.T) {
	t.Parallel()
	s := open(t)
	put(t, s, "a", strings.Repeat("x", 100))
	r, err := s.Get(t.Context(), "a", 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := os.Truncate(filepath.Join(s.path, "a"), 60); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(r)
	if len(got) != 60 || !errors.Is(err, io.ErrUnexpectedEOF) || core.CodeOf(err) != core.CodeStoreUnavailable {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// TestDiskFull puts an object that does not fit on the disk.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), syscall.Unmount(dir, 0)); err != nil {
			t.Error(err)
		}
	})
	put(t, s, "fits", "x")
	if err := blobtest.Put(t.Context(), s, "big", blobtest.Bytes(1, 2<<20)); core.CodeOf(err) != core.CodeDiskFull {
		t.Errorf("got %v, want DISK_FULL", err)
	}
	if _, err := s.Stat(t.Context(), "big"); !errors.Is(err, blob.ErrNotFound) {
		t.Error(err)
	}
	put(t, s, "fits-again", "x") // the partial file of the other object is gone
}

// putForEver puts objects whose keys are their digests.
func putForEver(path string) {
	s, err := Open(path)
	for i := uint64(os.Getpid()) << 20; err == nil; i++ {
		data := blobtest.Bytes(i, 3<<20)
		err = blobtest.Put(context.Background(), s, "packs/"+core.DigestOf(data).Hex(), data)
		os.Stdout.WriteString("put\n")
	}
	os.Stdout.WriteString(err.Error() + "\n")
	os.Exit(1)
}

// TestKill kills writers in the middle: every visible object is complete, and Sweep removes the rest.
func TestKill(t *testing.T) {
	t.Parallel()
	s := open(t)
	for range 10 {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), writerEnv+"="+s.path)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for range 2 { // the kill hits one of the next objects
			if !lines.Scan() || lines.Text() != "put" {
				t.Errorf("the writer said %q", lines.Text())
			}
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	n := 0
	for info, err := range s.List(t.Context(), "packs/") {
		if err != nil {
			t.Fatal(err)
		}
		data, err := blobtest.Get(t.Context(), s, info.Key, 0, info.Size)
		if err != nil || "packs/"+core.DigestOf(data).Hex() != info.Key {
			t.Errorf("%s is not whole: %d bytes, %v", info.Key, len(data), err)
		}
		n++
	}
	if n < 20 {
		t.Errorf("%d objects of 20 or more", n)
	}
	if err := s.Sweep(t.Context(), time.Now().Add(time.Hour)); err != nil {
		t.Error(err)
	}
	if names, err := s.names(temporary); err != nil || len(names) != 0 {
		t.Errorf("left: %q, %v", names, err)
	}
}
