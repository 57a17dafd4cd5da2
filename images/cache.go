package images

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
)

// Kinds of cached parts and facts; each is the beginning of a cache key.
const (
	KindKernel  = "kernel"
	KindRootFS  = "rootfs"
	KindOverlay = "overlay"
	KindBuild   = "build"
	KindResolve = "resolve"
	KindOrigin  = "origin"
	// KindReference is a fact about the reference of a pulled image.
	KindReference = "reference"
	// KindPulled is a fact about an image that was pulled for a project.
	KindPulled = "pulled"
)

// BuildFact is the cached result of a whole build.
type BuildFact struct {
	Digest core.Digest `json:"digest"`
}

// CacheKey is the digest of everything that a cached part depends on.
func CacheKey(kind string, inputs any) (string, error) {
	raw, err := json.Marshal(struct {
		Recipe int    `json:"recipe"`
		Kind   string `json:"kind"`
		Inputs any    `json:"inputs"`
	}{RecipeVersion, kind, inputs})
	if err != nil {
		return "", fmt.Errorf("make a cache key: %w", err)
	}
	return kind + "-" + core.DigestOf(raw).Hex(), nil
}

// CacheGet reads a cached fact. It returns false if there is none, or if it cannot be read.
func (g *Staging) CacheGet(key string, v any) bool { return g.store.cacheGet(key, v) }

// cacheGet reads the small JSON file of a fact.
func (s *Store) cacheGet(key string, v any) bool {
	raw, err := os.ReadFile(filepath.Join(s.dir, cacheDir, key))
	return err == nil && json.Unmarshal(raw, v) == nil
}

// CachePut keeps a fact in the cache.
func (g *Staging) CachePut(key string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("cache %s: %w", key, err)
	}
	if err := atomicfile.Write(g.Cached(key), raw, 0o644); err != nil {
		return fmt.Errorf("cache %s: %w", key, err)
	}
	return nil
}

// Cached is the path of a cached part, if there is one.
func (g *Staging) Cached(key string) string { return filepath.Join(g.store.dir, cacheDir, key) }

// CacheAdopt publishes the directory dir as a cached part, replacing a damaged one, and returns its path.
func (g *Staging) CacheAdopt(ctx context.Context, key, dir string) (string, error) {
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		return stageFile(path)
	})
	if err != nil {
		return "", fmt.Errorf("cache %s: %w", key, err)
	}
	to := g.Cached(key)
	if _, err := os.Lstat(to); err == nil {
		if err := g.store.discard(ctx, to); err != nil {
			return "", err
		}
	}
	if err := errors.Join(atomicfile.SyncDir(dir), atomicfile.Rename(dir, to)); err != nil {
		return "", fmt.Errorf("cache %s: %w", key, err)
	}
	return to, nil
}

// pruneCache removes cached root file systems that no image uses (images have hard links to them), kernels that no
// image was made from, except the newest, and facts about images that no longer exist.
func (s *Store) pruneCache(ctx context.Context) error {
	entries, err := os.ReadDir(filepath.Join(s.dir, cacheDir))
	if err != nil {
		return fmt.Errorf("prune image cache: %w", err)
	}
	keep := s.neededKernels(entries)
	var errs []error
	for _, e := range entries {
		path := filepath.Join(s.dir, cacheDir, e.Name())
		switch {
		case strings.HasPrefix(e.Name(), KindKernel+"-"):
			if !keep[e.Name()] {
				errs = append(errs, s.discard(ctx, path))
			}
		case strings.HasPrefix(e.Name(), KindRootFS+"-"):
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(path, RootFSFile), &st); err == nil && st.Nlink > 1 {
				continue
			}
			errs = append(errs, s.discard(ctx, path))
		case strings.HasPrefix(e.Name(), KindBuild+"-"), strings.HasPrefix(e.Name(), KindOrigin+"-"), strings.HasPrefix(e.Name(), KindReference+"-"), strings.HasPrefix(e.Name(), KindPulled+"-"):
			var fact BuildFact
			if s.cacheGet(e.Name(), &fact) {
				if _, err := os.Lstat(s.imageDir(fact.Digest)); err == nil {
					continue
				}
			}
			errs = append(errs, os.Remove(path))
		}
	}
	return errors.Join(errs...)
}

// neededKernels returns the names of the cached kernels to keep: those that an image was made from, and the newest,
// which the next image will have. While an image cannot be read, all are kept.
func (s *Store) neededKernels(entries []fs.DirEntry) map[string]bool {
	list, damaged := s.List()
	used := map[string]bool{}
	for _, img := range list {
		used[img.Recipe.KernelPackage] = true
	}
	keep := map[string]bool{}
	newest := ""
	var newestAt time.Time
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), KindKernel+"-") {
			continue
		}
		b, err := OpenBundle(filepath.Join(s.dir, cacheDir, e.Name()))
		keep[e.Name()] = damaged != nil || err == nil && used[b.Kernel.String()]
		if info, err := e.Info(); err == nil && info.ModTime().After(newestAt) {
			newest, newestAt = e.Name(), info.ModTime()
		}
	}
	keep[newest] = true
	return keep
}
