package roots

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// checks remembers which root file systems of images were compared with the digest in image.json. Each is read once per start of the runner,
// and again after its file was replaced or written. The zero value is ready for use.
type checks struct {
	mu   sync.Mutex // guards seen
	seen map[Key]*checkedFile
}

// checkedFile is a file with the right digest.
type checkedFile struct {
	mu   sync.Mutex // held while the file is read: forks of the same image wait for one reader, forks of other images do not
	info os.FileInfo
	mod  time.Time
}

func (c *checks) of(k Key) *checkedFile {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.seen == nil {
		c.seen = make(map[Key]*checkedFile)
	}
	if c.seen[k] == nil {
		c.seen[k] = new(checkedFile)
	}
	return c.seen[k]
}

func (c *checkedFile) same(info os.FileInfo) bool {
	return c.info != nil && os.SameFile(c.info, info) && c.info.Size() == info.Size() && c.mod.Equal(info.ModTime())
}

// check refuses a root file system that differs from its image on this host: CHECKPOINT_CORRUPT, with the name of the file. It accepts a root
// file system from the store, which was verified frame by frame, and one whose image is no longer here, because it cannot be compared.
func (s *Store) check(k Key, f *os.File) error {
	if k.Stored() {
		return nil
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	c := s.checks.of(k)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.same(info) {
		return nil
	}
	img, err := s.cfg.Images.Get("sha256:" + string(k))
	if core.CategoryOf(err) == core.NotFound {
		return nil
	}
	if err != nil {
		return err
	}
	want := img.Files[filepath.Base(img.RootFS)]
	got, n, err := core.DigestReader(io.NewSectionReader(f, 0, info.Size()))
	if err != nil {
		return fmt.Errorf("verify %s: %w", f.Name(), err)
	}
	if got != want.Digest || n != want.SizeBytes {
		return core.Errorf(core.DataLoss, core.CodeCheckpointCorrupt,
			"%s is no longer the root file system of image %s: it has the digest %s instead of %s; build the image again and restart the runner",
			f.Name(), img.Digest.Short(), got.Short(), want.Digest.Short())
	}
	c.info, c.mod = info, info.ModTime()
	return nil
}
