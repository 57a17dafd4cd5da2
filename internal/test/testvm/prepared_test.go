package testvm

import (
	"os"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/images"
)

// TestPrepare makes a directory, and takes from it everything that tests take from it on other machines.
func TestPrepare(t *testing.T) {
	t.Parallel()
	_, want := Image(t) // and what it needs
	dir := t.TempDir()
	if err := Prepare(t.Context(), dir, "internal/test/e2e/guestprobe"); err != nil {
		t.Fatal(err)
	}
	for _, pkg := range []string{guestAgent, vmmGuest, "internal/test/e2e/guestprobe"} {
		path, err := PreparedProgram(dir, pkg)
		if err != nil {
			t.Error(err)
			continue
		}
		if info, err := os.Stat(path); err != nil || info.Mode()&0o111 == 0 {
			t.Errorf("%s is no program: %v, %v", pkg, info, err)
		}
	}
	if _, err := PreparedProgram(dir, "cmd/coppice"); err == nil || !strings.Contains(err.Error(), "cmd/coppice was not prepared") {
		t.Errorf("a program that is not there: %v", err)
	}
	store, img, err := PreparedStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	if img.Digest != want.Digest || img.Name != images.DefaultName {
		t.Errorf("the image is %s, named %q, want %s", img.Digest, img.Name, want.Digest)
	}
	if err := store.Verify(t.Context(), img); err != nil {
		t.Error(err)
	}
	k, err := preparedKernel(dir)
	if err != nil {
		t.Fatal(err)
	}
	if real := Kernel(t); k.Release != real.Release || k.CommandLine != real.CommandLine {
		t.Errorf("the kernel is %+v, want %+v", k, real)
	}
	program, err := PreparedProgram(dir, vmmGuest)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pack(k, program); err != nil {
		t.Error(err)
	}
}
