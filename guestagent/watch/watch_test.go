//go:build linux

package watch

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// TestMovedTrees: whoever sees that a directory was moved here may change what is below at once, and sees the event of that. So the event of the
// directory comes after all below it is watched.
func TestMovedTrees(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "n", "e", "w"), 0o755); err != nil {
		t.Fatal(err)
	}
	var s Watches
	var watch atomic.Pointer[guestapi.Watch] // once it exists
	isMove := func(e guestapi.WatchEvent) bool { return e.Type == guestapi.WatchCreate && e.Name == "m" }
	do := func(ctx context.Context, fn func() error) error {
		if w := watch.Load(); w != nil { // the moved directory is about to be watched
			err := s.Read(ctx, w.ID, 0, false, func(e guestapi.WatchEvent) error {
				if isMove(e) {
					t.Errorf("%+v is told before what is below is watched", e)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		}
		return fn()
	}
	w, err := s.Create(t.Context(), do, guestapi.CreateWatch{Path: dir, Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	watch.Store(&w)
	if err := os.Rename(filepath.Join(dir, "n"), filepath.Join(dir, "m")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	seen := errors.New("seen")
	if err := s.Read(ctx, w.ID, 0, true, func(e guestapi.WatchEvent) error {
		switch {
		case isMove(e):
			return os.WriteFile(filepath.Join(dir, "m", "e", "w", "f"), nil, 0o600)
		case e.Type == guestapi.WatchCreate && e.Name == "m/e/w/f":
			return seen
		}
		return nil
	}); !errors.Is(err, seen) {
		t.Errorf("the file in the moved tree: %v", err)
	}
}
