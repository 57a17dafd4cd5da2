package images

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// RecordPulled notes that an image was pulled for a project: it has no name, and RemovePulled removes it when nothing needs it. A later
// note makes it young again.
func (g *Staging) RecordPulled(d core.Digest) error {
	key, err := CacheKey(KindPulled, d)
	if err != nil {
		return err
	}
	return g.CachePut(key, BuildFact{Digest: d})
}

// pulled returns when each image was last pulled for a project.
func (s *Store) pulled() (map[core.Digest]time.Time, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, cacheDir))
	if err != nil {
		return nil, fmt.Errorf("list pulled images: %w", err)
	}
	out := map[core.Digest]time.Time{}
	for _, e := range entries {
		var fact BuildFact
		if !strings.HasPrefix(e.Name(), KindPulled+"-") || !s.cacheGet(e.Name(), &fact) {
			continue
		}
		if info, err := e.Info(); err == nil {
			out[fact.Digest] = info.ModTime()
		}
	}
	return out, nil
}

// PulledBytes is the space of the images that were pulled for projects and have no name, and of all layers, with those that no image has yet.
func (s *Store) PulledBytes() (int64, error) {
	list, _ := s.List() // of a damaged image nothing is known
	var sum int64
	for _, img := range list {
		if img.Pulled && img.Name == "" {
			sum += img.Files[RootFSFile].SizeBytes
		}
	}
	entries, err := os.ReadDir(filepath.Join(s.dir, layersDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("look for the space of layers: %w", err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			sum += info.Size()
		}
	}
	return sum, nil
}

// RemovePulled removes images that were pulled for projects, have no name, are not in use, and were last pulled at least age ago. It
// returns how many such images are left. inUse says which are in use; false: it does not know all, and none is removed. It is asked when
// nobody else can change the store: an image may have got a name, or may have been pulled again, while the lock was waited for.
func (s *Store) RemovePulled(ctx context.Context, inUse func() (map[core.Digest]bool, bool), age time.Duration) (left int, err error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return 0, err
	}
	defer unlock()
	pulled, err := s.pulled()
	if err != nil {
		return 0, err
	}
	names, err := s.names()
	if err != nil {
		return 0, err
	}
	named := map[core.Digest]bool{}
	for _, d := range names {
		named[d] = true
	}
	used, all := inUse()
	var errs []error
	for d, at := range pulled {
		if named[d] {
			continue
		}
		if !all || used[d] || time.Since(at) < age {
			left++
			continue
		}
		if err := s.remove(ctx, string(d)); err != nil && core.CodeOf(err) != core.CodeImageNotFound {
			errs = append(errs, err)
			left++
		}
	}
	return left, errors.Join(errs...)
}
