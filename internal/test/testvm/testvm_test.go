package testvm

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/images"
)

func TestGuestIsCached(t *testing.T) {
	t.Parallel()
	first := Guest(t)
	before, err := os.Stat(first.Initrd)
	if err != nil {
		t.Fatal(err)
	}
	if got := Guest(t); got != first {
		t.Errorf("the second is %+v, want %+v", got, first)
	}
	after, err := os.Stat(first.Initrd)
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(before, after) {
		t.Error("the initrd was written again")
	}
	for _, f := range []string{first.Kernel, first.Initrd} {
		info, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm()&0o444 != 0o444 {
			t.Errorf("%s has mode %v: a VMM with a user of its own cannot read it", filepath.Base(f), info.Mode())
		}
	}
}

func TestRemoveOld(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, age := range map[string]time.Duration{"new": time.Hour, "old": keep + time.Hour, lockFile: keep + time.Hour} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Now().Add(-age)
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
	}
	if err := removeOld(dir); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"new": true, "old": false, lockFile: true} {
		if _, err := os.Stat(filepath.Join(dir, name)); (err == nil) != want {
			t.Errorf("%s is there: %v, want %v", name, err == nil, want)
		}
	}
}

func TestFakeImage(t *testing.T) {
	t.Parallel()
	store, image := FakeImage(t)
	if err := store.Verify(t.Context(), image); err != nil {
		t.Error(err)
	}
}

func TestImage(t *testing.T) {
	t.Parallel()
	store, image := Image(t)
	if image.Name != images.DefaultName {
		t.Errorf("the image is named %q", image.Name)
	}
	if _, again := Image(t); again.Digest != image.Digest {
		t.Errorf("the second is %s, want %s", again.Digest, image.Digest)
	}
	if err := store.Verify(t.Context(), image); err != nil {
		t.Error(err)
	}
}
