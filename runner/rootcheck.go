package runner

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// rootChecks remembers which root file systems of images were compared with the digest in image.json. Each is read once per start of the runner,
// and again when its file is another or was written. The zero value is ready for use.
type rootChecks struct {
	mu   sync.Mutex // guards seen, and is held while a file is read: forks of one image wait for one reader
	seen map[rootKey]checkedFile
}

type checkedFile struct {
	info os.FileInfo
	mod  time.Time
}

func (c checkedFile) same(info os.FileInfo) bool {
	return c.info != nil && os.SameFile(c.info, info) && c.info.Size() == info.Size() && c.mod.Equal(info.ModTime())
}

// checkRoot refuses a root file system that is not what the image of this host says: CHECKPOINT_CORRUPT, naming the file. One that came from the
// store was verified frame by frame, and one of an image that is not here any more cannot be compared.
func (r *Runner) checkRoot(k rootKey, f *os.File) error {
	if k.stored() {
		return nil
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	c := &r.rootChecks
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.seen[k].same(info) {
		return nil
	}
	img, err := r.cfg.Images.Get("sha256:" + string(k))
	if core.CategoryOf(err) == core.NotFound {
		return nil
	}
	if err != nil {
		return err
	}
	want := img.Files[filepath.Base(img.RootFS)]
	read, err := os.Open(f.Name())
	if err != nil {
		return err
	}
	defer read.Close()
	got, n, err := core.DigestReader(read)
	if err != nil {
		return fmt.Errorf("verify %s: %w", f.Name(), err)
	}
	if got != want.Digest || n != want.SizeBytes {
		return core.Errorf(core.DataLoss, core.CodeCheckpointCorrupt,
			"%s is not the root file system of image %s any more: it has the digest %s instead of %s; build the image again and restart the runner",
			f.Name(), img.Digest.Short(), got.Short(), want.Digest.Short())
	}
	if c.seen == nil {
		c.seen = make(map[rootKey]checkedFile)
	}
	c.seen[k] = checkedFile{info, info.ModTime()}
	return nil
}
