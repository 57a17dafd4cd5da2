package testvm

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/images/build"
)

// PreparedVariable names a directory that Prepare has made, for machines without the go command and a network: there,
// the tests use its files, and do not make them.
const PreparedVariable = "COPPICE_TEST_PREPARED"

// Prepared returns that directory; "" if there is none.
func Prepared() string { return os.Getenv(PreparedVariable) }

const module = "github.com/coppice-dev/coppice/"

// PreparedProgram returns the executable of a main package of this module, such as cmd/coppice, from the directory.
func PreparedProgram(dir, pkg string) (string, error) {
	path := filepath.Join(dir, "programs", filepath.FromSlash(pkg))
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("%s was not prepared in %s: %w", pkg, PreparedVariable, err)
	}
	return path, nil
}

// PreparedStore opens the store in the directory. Its only image is named images.DefaultName. Like every store, it must
// be writable.
func PreparedStore(dir string) (*images.Store, images.Image, error) {
	store, err := images.Open(filepath.Join(dir, "images"))
	if err != nil {
		return nil, images.Image{}, err
	}
	img, err := store.Get(images.DefaultName)
	return store, img, err
}

func preparedKernel(dir string) (build.Kernel, error) {
	return build.OpenKernel(filepath.Join(dir, "kernel"))
}

// Prepare puts into a new directory the real image, its kernel, the guest of package vmmtest and the named main packages of
// this module, built to run anywhere. The working directory must be in the module.
func Prepare(ctx context.Context, dir string, packages ...string) error {
	for _, pkg := range append([]string{guestAgent, vmmGuest}, packages...) {
		if err := Compile(ctx, filepath.Join(dir, "programs", filepath.FromSlash(pkg)), module+pkg); err != nil {
			return err
		}
	}
	store, err := openStore()
	if err != nil {
		return err
	}
	k, err := build.FetchKernel(ctx, store, nil)
	if err != nil {
		return err
	}
	if err := os.CopyFS(filepath.Join(dir, "kernel"), os.DirFS(filepath.Dir(k.VMLinuz))); err != nil {
		return fmt.Errorf("copy the kernel: %w", err)
	}
	agent, err := PreparedProgram(dir, guestAgent)
	if err != nil {
		return err
	}
	img, err := build.Image(ctx, store, build.Options{AgentBinary: agent, Packages: Packages()})
	if err != nil {
		return err
	}
	own, err := images.Open(filepath.Join(dir, "images"))
	if err != nil {
		return err
	}
	if err := copyImage(ctx, img, filepath.Join(own.Dir(), filepath.Base(img.Dir))); err != nil {
		return err
	}
	return own.Tag(ctx, string(img.Digest), images.DefaultName)
}

// copyImage copies an image's files; the template of the overlay stays sparse.
func copyImage(ctx context.Context, img images.Image, to string) error {
	if b, err := exec.CommandContext(ctx, "cp", "--archive", "--sparse=always", img.Dir, to).CombinedOutput(); err != nil { //nolint:gosec // G204: paths of a store
		return fmt.Errorf("copy image %s: %w: %s", img.Digest.Short(), err, b)
	}
	return nil
}

// Compile builds a static program of this module, with the same bytes wherever the source is. program is the path of its package.
func Compile(ctx context.Context, out, program string) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Minute)
	defer cancel()
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil { //nolint:gosec // G301: tests that are not root read it
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=", "-o", out, program) //nolint:gosec // G204: tests name it
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", program, err, b)
	}
	return nil
}
