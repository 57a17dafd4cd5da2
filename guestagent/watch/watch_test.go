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

// TestMovedTrees: whoever sees that a directory was moved here may change what is below at once, and sees the event of that.
func TestMovedTrees(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "n", "e", "w"), 0o755); err != nil {
		t.Fatal(err)
	}
	var s Watches
	var slow atomic.Bool
	do := func(_ context.Context, fn func() error) error {
		if slow.Load() {
			time.Sleep(50 * time.Millisecond) // a busy guest
		}
		return fn()
	}
	w, err := s.Create(t.Context(), do, guestapi.CreateWatch{Path: dir, Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	slow.Store(true)
	if err := os.Rename(filepath.Join(dir, "n"), filepath.Join(dir, "m")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	seen := errors.New("seen")
	if err := s.Read(ctx, w.ID, 0, true, func(e guestapi.WatchEvent) error {
		switch {
		case e.Type == guestapi.WatchCreate && e.Name == "m":
			return os.WriteFile(filepath.Join(dir, "m", "e", "w", "f"), nil, 0o600)
		case e.Type == guestapi.WatchCreate && e.Name == "m/e/w/f":
			return seen
		}
		return nil
	}); !errors.Is(err, seen) {
		t.Errorf("the file in the moved tree: %v", err)
	}
}
