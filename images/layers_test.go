package images

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
)

func layerFiles(t *testing.T, s *Store) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(s.dir, layersDir))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		if e.Name() != layersLock {
			out = append(out, e.Name())
		}
	}
	return out
}

func mustAdopt(t *testing.T, l *Layers, text string) core.Digest {
	t.Helper()
	d := core.DigestOf([]byte(text))
	f, err := l.Partial(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteString(text)
	if err := errors.Join(err, l.Adopt(f, d), f.Close()); err != nil {
		t.Fatal(err)
	}
	return d
}

// TestLayersArePruned: a layer stays while an image has it, while a process has the layers open, and otherwise for a day, in
// which an interrupted pull may go on. The removal of an image removes the layers that no other image has.
func TestLayersArePruned(t *testing.T) {
	t.Parallel()
	s := openStore(t)
	if err := s.pruneLayers(); err != nil { // there is none, not even their directory
		t.Fatal(err)
	}
	l, err := s.Layers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	shared, own, unused := mustAdopt(t, l, "shared"), mustAdopt(t, l, "own"), mustAdopt(t, l, "unused")
	part, err := l.Partial(t.Context(), core.DigestOf([]byte("part")))
	if err != nil {
		t.Fatal(err)
	}
	_, err = part.WriteString("pa")
	if err := errors.Join(err, part.Close()); err != nil {
		t.Fatal(err)
	}
	first := mustPublish(t, s, "first", "a", shared, own)
	mustPublish(t, s, "second", "b", shared)
	if err := s.pruneLayers(); err != nil || len(layerFiles(t, s)) != 4 {
		t.Errorf("while a process has them open: %v, %v", layerFiles(t, s), err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if l, err = s.Layers(t.Context()); err != nil || len(layerFiles(t, s)) != 4 {
		t.Errorf("on the same day: %v, %v", layerFiles(t, s), err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-2 * keptUnused)
	for _, name := range layerFiles(t, s) {
		if err := os.Chtimes(filepath.Join(s.dir, layersDir, name), old, old); err != nil {
			t.Fatal(err)
		}
	}
	if l, err = s.Layers(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{filepath.Base(l.Path(shared)), filepath.Base(l.Path(own))}
	slices.Sort(want)
	if got := layerFiles(t, s); !slices.Equal(got, want) {
		t.Errorf("after a day: %v, want %v without %s", got, want, unused.Short())
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	now := time.Now() // a layer of the removed image goes at once
	if err := os.Chtimes(l.Path(own), now, now); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), string(first.Digest)); err != nil {
		t.Fatal(err)
	}
	if got := layerFiles(t, s); !slices.Equal(got, []string{filepath.Base(l.Path(shared))}) {
		t.Errorf("after the first image was removed: %v", got)
	}
}

// TestPartialsHaveOneOwner: a second owner of a layer's part waits for the first, and finds what it has left.
func TestPartialsHaveOneOwner(t *testing.T) {
	t.Parallel()
	s := openStore(t)
	l, err := s.Layers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d := core.DigestOf([]byte("x"))
	first, err := l.Partial(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := l.Partial(ctx, d); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second owner: %v", err)
	}
	if _, err := first.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	got := make(chan error)
	go func() {
		second, err := l.Partial(t.Context(), d)
		if err == nil {
			info, statErr := second.Stat()
			if statErr == nil && info.Size() != 0 {
				statErr = errors.New("the part of a published layer is not empty")
			}
			err = errors.Join(statErr, l.Discard(second), second.Close())
		}
		got <- err
	}()
	if err := errors.Join(l.Adopt(first, d), first.Close(), <-got); err != nil {
		t.Error(err)
	}
	if files := layerFiles(t, s); len(files) != 1 {
		t.Errorf("files: %v", files)
	}
}
