package images

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Image is a published guest image. Its files are immutable and read-only; Overlay is a template that every sandbox
// clones and grows, the others are used in place.
type Image struct {
	// Name is the name under which the image was found or built; empty when it has none.
	Name   string
	Digest core.Digest
	Dir    string
	// Absolute paths of the files.
	Kernel, Initrd, RootFS, Overlay string

	Architecture  string
	RootFSType    string
	KernelRelease string
	// CommandLine is the whole kernel command line. It belongs to the image (and so does the clock source it names):
	// a VMM uses it as it is.
	CommandLine string
	// References are the whole references under which the image was pulled, sorted. Only List sets them.
	References []string
	// Pulled means that the image was pulled for a project; of an image of List.
	Pulled bool
	// CreatedAt is when the image was published in this store. It is not part of the digest.
	CreatedAt time.Time
	// SizeBytes is the sum of the files' apparent sizes without the overlay, which is sparse and nearly empty.
	SizeBytes int64
	Files     map[string]File
	Recipe    Recipe
	// Config is what an image of a registry says about its programs; nil for other images.
	Config *Config
}

// loadImage reads the image in dir, whose name is the digest. It checks image.json against the digest and the files'
// sizes against image.json; Store.Verify reads every byte.
func loadImage(dir string, digest core.Digest) (Image, error) {
	path := filepath.Join(dir, manifestFile)
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Image{}, corrupt(digest, "image.json is missing")
	}
	if err != nil {
		return Image{}, fmt.Errorf("read image %s: %w", digest.Short(), err)
	}
	if got := core.DigestOf(raw); got != digest {
		return Image{}, corrupt(digest, "image.json has the digest %s", got.Short())
	}
	m, err := decodeManifest(raw)
	if err != nil {
		return Image{}, corrupt(digest, "%v", err)
	}
	info, err := os.Stat(path)
	if err != nil {
		return Image{}, fmt.Errorf("read image %s: %w", digest.Short(), err)
	}
	img := Image{
		Digest: digest, Dir: dir,
		Kernel: filepath.Join(dir, KernelFile), Initrd: filepath.Join(dir, InitrdFile),
		RootFS: filepath.Join(dir, RootFSFile), Overlay: filepath.Join(dir, OverlayFile),
		Architecture: m.Architecture, RootFSType: m.RootFSType, KernelRelease: m.KernelRelease,
		CommandLine: m.CommandLine, CreatedAt: info.ModTime(), Files: m.Files, Recipe: m.Recipe, Config: m.Config,
	}
	for _, name := range imageFiles() {
		if err := checkSize(filepath.Join(dir, name), m.Files[name].SizeBytes); err != nil {
			return Image{}, corrupt(digest, "%v", err)
		}
		if name != OverlayFile {
			img.SizeBytes += m.Files[name].SizeBytes
		}
	}
	return img, nil
}

func checkSize(path string, want int64) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s is missing", filepath.Base(path))
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is not a regular file", filepath.Base(path))
	case info.Size() != want:
		return fmt.Errorf("%s has %d bytes instead of %d", filepath.Base(path), info.Size(), want)
	}
	return nil
}

// HashFile returns the digest and size of a file.
func HashFile(path string) (File, error) {
	f, err := os.Open(path)
	if err != nil {
		return File{}, err
	}
	defer f.Close()
	digest, n, err := core.DigestReader(io.Reader(f))
	if err != nil {
		return File{}, fmt.Errorf("hash %s: %w", filepath.Base(path), err)
	}
	return File{Digest: digest, SizeBytes: n}, nil
}
