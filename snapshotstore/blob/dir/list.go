package dir

import (
	"context"
	"errors"
	"io/fs"
	"iter"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// List implements blob.Blobs. For each level, it keeps the names of one directory in memory.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		if err := blob.CheckPrefix(prefix); err != nil {
			yield(blob.Info{}, err)
			return
		}
		s.walk(ctx, ".", prefix, yield)
	}
}

// walk yields the objects below a directory and reports whether to go on.
func (s *Store) walk(ctx context.Context, dir, prefix string, yield func(blob.Info, error) bool) bool {
	names, err := s.names(dir)
	if err != nil {
		yield(blob.Info{}, err)
		return false
	}
	for _, name := range names {
		if ctx.Err() != nil {
			yield(blob.Info{}, context.Cause(ctx))
			return false
		}
		key, isDir := path.Join(dir, name), strings.HasSuffix(name, "/")
		switch {
		case isDir && (strings.HasPrefix(key+"/", prefix) || strings.HasPrefix(prefix, key+"/")):
			if !s.walk(ctx, key, prefix, yield) {
				return false
			}
		case !isDir && strings.HasPrefix(key, prefix) && blob.ValidKey(key):
			info, err := s.Stat(ctx, key)
			if errors.Is(err, blob.ErrNotFound) { // removed meanwhile, or not an object
				continue
			}
			if !yield(info, err) || err != nil {
				return false
			}
		}
	}
	return true
}

// names returns the names in a directory in the order of the keys below them; the names of directories end with a
// slash. It leaves out names that cannot belong to keys, except in the temporary directory.
func (s *Store) names(dir string) ([]string, error) {
	f, err := s.root.Open(dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, s.mapError("list "+dir, err)
	}
	defer f.Close()
	entries, err := f.ReadDir(-1)
	if err != nil {
		return nil, s.mapError("list "+dir, err)
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		name := e.Name()
		if dir != temporary && name[0] == '.' {
			continue
		}
		if e.IsDir() {
			name += "/"
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return names, nil
}
