package blob_test

import (
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

func TestCheckGet(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		off, n int64
		ok     bool
	}{{0, 0, true}, {5, math.MaxInt64 - 5, true}, {6, math.MaxInt64 - 5, false}, {-1, 1, false}, {1, -1, false}} {
		if err := blob.CheckGet("k", c.off, c.n); (err == nil) != c.ok {
			t.Errorf("%d bytes from %d on: %v", c.n, c.off, err)
		}
	}
}

// FuzzValidKey checks what backends rely on: a valid key is a relative path that cleaning does not change, it needs no
// escaping anywhere, and each of its beginnings is a valid prefix.
func FuzzValidKey(f *testing.F) {
	for _, key := range []string{"a", "packs/ab/cd.e-f_0", "", "/", "a/", "../a", "a/./b", ".tmp/x", "A", "a//b", strings.Repeat("a", 256)} {
		f.Add(key)
	}
	f.Fuzz(func(t *testing.T, key string) {
		err := blob.CheckKey(key)
		if (err == nil) != blob.ValidKey(key) || err != nil && core.CategoryOf(err) != core.Invalid {
			t.Errorf("%q: valid is %v, and the check says %v", key, blob.ValidKey(key), err)
		}
		if err != nil {
			return
		}
		if !filepath.IsLocal(key) || filepath.Clean(key) != key || core.Clip(key) != key[:min(len(key), 120)] && len(key) <= 120 {
			t.Errorf("%q is no plain path", key)
		}
		if strings.ContainsAny(key, "?#%&+ \\:*\"<>|~$") || strings.Contains("/"+key, "/.") || len(key) > blob.MaxKey {
			t.Errorf("%q needs escaping", key)
		}
		if key != "" {
			for i := range len(key) + 1 {
				if !blob.ValidPrefix(key[:i]) && !strings.HasSuffix(key[:i], "/.") {
					t.Errorf("%q begins a key and is no prefix", key[:i])
				}
			}
		}
	})
}
