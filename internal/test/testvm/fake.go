package testvm

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
)

// FakeOverlayBytes is the size of the overlay disk of FakeImage.
const FakeOverlayBytes = 64 << 10

// FakeImage returns a new store with an image that only has the form of one and boots nothing: enough for a runner
// whose driver is fakevmm. It needs no root and takes no time.
func FakeImage(t testing.TB) (*images.Store, images.Image) {
	t.Helper()
	store, image, err := NewFakeImage(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return store, image
}

// NewFakeImage is FakeImage for programs that are not tests; the store is in dir.
func NewFakeImage(ctx context.Context, dir string) (*images.Store, images.Image, error) {
	store, err := images.Open(dir)
	if err != nil {
		return nil, images.Image{}, err
	}
	content := map[string][]byte{
		"vmlinuz": []byte("no kernel"), "initrd.img": []byte("no initrd"), "rootfs.erofs": make([]byte, 4096),
		"overlay.ext4": make([]byte, FakeOverlayBytes),
	}
	files := make(map[string]images.File, len(content))
	for name, b := range content {
		files[name] = images.File{Digest: core.DigestOf(b), SizeBytes: int64(len(b))}
	}
	manifest, err := json.Marshal(map[string]any{
		"format": 1, "architecture": runtime.GOARCH, "kernel_release": "fake", "command_line": "", "rootfs_type": "erofs",
		"files": files, "recipe": images.Recipe{},
	})
	if err != nil {
		return nil, images.Image{}, err
	}
	digest := core.DigestOf(manifest)
	image := filepath.Join(store.Dir(), "sha256-"+digest.Hex())
	if err := os.Mkdir(image, 0o700); err != nil {
		return nil, images.Image{}, err
	}
	content["image.json"] = manifest
	for name, b := range content {
		if err := os.WriteFile(filepath.Join(image, name), b, 0o600); err != nil {
			return nil, images.Image{}, err
		}
	}
	if err := store.Tag(ctx, string(digest), images.DefaultName); err != nil {
		return nil, images.Image{}, err
	}
	found, err := store.Get(images.DefaultName)
	return store, found, err
}
