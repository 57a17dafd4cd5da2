//go:build linux

package guestagent

import (
	"bufio"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
	"github.com/coppice-dev/coppice/internal/test/require"
)

func (a *testAgent) watch(req guestapi.CreateWatch) guestapi.Watch {
	a.T.Helper()
	return guesttest.Must[guestapi.Watch](a.T)(guesttest.Ask[guestapi.Watch](a, http.MethodPost, guestapi.PathWatches, req))
}

// reader reads the events of a watch.
type reader struct {
	t    *testing.T
	scan *bufio.Scanner
	last int64
}

func (a *testAgent) events(id core.WatchID, query string) *reader {
	a.T.Helper()
	path := strings.Replace(guestapi.PathWatchEvents, "{id}", string(id), 1)
	req, err := http.NewRequestWithContext(a.T.Context(), http.MethodGet, a.URL+path+query, nil)
	if err != nil {
		a.T.Fatal(err)
	}
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil || res.StatusCode != http.StatusOK {
		a.T.Fatal(res.StatusCode, err)
	}
	a.T.Cleanup(func() { _ = res.Body.Close() })
	return &reader{t: a.T, scan: bufio.NewScanner(res.Body)}
}

// next returns the next event that is not of a kind that file systems and the kernel add.
func (r *reader) next() (guestapi.WatchEvent, bool) {
	r.t.Helper()
	var e guestapi.WatchEvent
	if !r.scan.Scan() {
		return e, false
	}
	if err := json.Unmarshal(r.scan.Bytes(), &e); err != nil || e.Seq <= r.last {
		r.t.Fatalf("%s (%v)", r.scan.Bytes(), err)
	}
	r.last = e.Seq
	return e, true
}

// until reads to an event and fails if it does not come.
func (r *reader) until(kind, name string) guestapi.WatchEvent {
	r.t.Helper()
	for {
		e, ok := r.next()
		if !ok {
			r.t.Fatalf("no %s of %s", kind, name)
		}
		if e.Type == kind && e.Name == name {
			return e
		}
	}
}

func do(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestWatchTree(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	dir := t.TempDir()
	do(t, os.MkdirAll(filepath.Join(dir, "a", "b"), 0o755))
	w := a.watch(guestapi.CreateWatch{Path: dir, Recursive: true})
	r := a.events(w.ID, "?follow=1")
	in := func(name string) string { return filepath.Join(dir, name) }

	do(t, os.WriteFile(in("a/b/f"), []byte("x"), 0o600))
	if e := r.until(guestapi.WatchCreate, "a/b/f"); e.Dir || e.Path != in("a/b/f") {
		t.Errorf("%+v", e)
	}
	r.until(guestapi.WatchWrite, "a/b/f")
	do(t, os.Chmod(in("a/b/f"), 0o644))
	r.until(guestapi.WatchChmod, "a/b/f")
	// A new tree is watched, with what was in it before it was.
	do(t, os.MkdirAll(in("n/e/w"), 0o755), os.WriteFile(in("n/e/w/f"), nil, 0o600))
	r.until(guestapi.WatchCreate, "n/e/w/f")
	// A tree that has moved is watched under its new path.
	do(t, os.Rename(in("n"), in("m")))
	if e := r.until(guestapi.WatchRename, "n"); !e.Dir {
		t.Errorf("%+v", e)
	}
	r.until(guestapi.WatchCreate, "m")
	do(t, os.Remove(in("m/e/w/f")))
	r.until(guestapi.WatchRemove, "m/e/w/f")
	// The end of the directory ends the watch.
	do(t, os.RemoveAll(dir))
	r.until(guestapi.WatchRemove, "")
	if e, more := r.next(); more {
		t.Errorf("after the end: %+v", e)
	}
	list := guesttest.Must[guestapi.Watches](t)(guesttest.Ask[guestapi.Watches](a, http.MethodGet, guestapi.PathWatches, nil))
	if len(list.Watches) != 1 || !list.Watches[0].Ended || list.Watches[0].Incomplete || list.Watches[0].Last != r.last {
		t.Errorf("%+v, the last event was %d", list, r.last)
	}
}

// TestWatchOneDirectory: what is below is not watched, and a reader that returns misses nothing.
func TestWatchOneDirectory(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	dir := t.TempDir()
	do(t, os.Mkdir(filepath.Join(dir, "sub"), 0o755))
	w := a.watch(guestapi.CreateWatch{Path: dir})
	do(t, os.WriteFile(filepath.Join(dir, "sub", "unseen"), nil, 0o600), os.WriteFile(filepath.Join(dir, "one"), nil, 0o600), os.WriteFile(filepath.Join(dir, "two"), nil, 0o600))
	one := a.events(w.ID, "?follow=1").until(guestapi.WatchCreate, "one")
	if one.Seq != 1 {
		t.Errorf("%+v", one)
	}
	two := a.events(w.ID, "?follow=1&after="+itoa(int(one.Seq)))
	two.until(guestapi.WatchCreate, "two")
	if _, _, err := a.Do(http.MethodDelete, strings.Replace(guestapi.PathWatch, "{id}", string(w.ID), 1), nil); err != nil { //nolint:bodyclose // Do has read and closed it
		t.Fatal(err)
	}
	for more := true; more; { // the stream ends with the watch
		_, more = two.next()
	}
	if _, _, err := a.Do(http.MethodDelete, strings.Replace(guestapi.PathWatch, "{id}", string(w.ID), 1), nil); core.CodeOf(err) != core.CodeWatchNotFound { //nolint:bodyclose // Do has read and closed it
		t.Errorf("a second time: %v", err)
	}
}

func TestWatchRights(t *testing.T) {
	t.Parallel()
	dir := userDir(t)
	a := newTestAgent(t)
	create := func(req guestapi.CreateWatch) error {
		_, err := guesttest.Ask[guestapi.Watch](a, http.MethodPost, guestapi.PathWatches, req)
		return err
	}
	if err := create(guestapi.CreateWatch{Path: t.TempDir(), User: nobody}); core.CodeOf(err) != guestapi.CodeFileDenied {
		t.Errorf("root's directory: %v", err)
	}
	do(t, os.Mkdir(filepath.Join(dir, "private"), 0o700), os.Mkdir(filepath.Join(dir, "open"), 0o755))
	w := a.watch(guestapi.CreateWatch{Path: dir, User: nobody, Recursive: true})
	if !w.Incomplete {
		t.Error("a directory that the user may not read counts as watched")
	}
	do(t, os.WriteFile(filepath.Join(dir, "private", "f"), nil, 0o600), os.WriteFile(filepath.Join(dir, "open", "f"), nil, 0o600))
	r := a.events(w.ID, "?follow=1")
	if e, _ := r.next(); e.Name != "open/f" {
		t.Errorf("%+v", e)
	}
	for path, code := range map[string]core.Code{"/nowhere": core.CodeFileNotFound, "/etc/hostname": guestapi.CodeFileConflict} {
		if err := create(guestapi.CreateWatch{Path: path}); core.CodeOf(err) != code {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// TestWatchesAreBounded: watches, and the events that one keeps.
func TestWatchesAreBounded(t *testing.T) {
	t.Parallel()
	require.Root(t)
	a := newTestAgent(t)
	dir := t.TempDir()
	w := a.watch(guestapi.CreateWatch{Path: dir})
	for range 31 {
		a.watch(guestapi.CreateWatch{Path: "/"})
	}
	if _, err := guesttest.Ask[guestapi.Watch](a, http.MethodPost, guestapi.PathWatches, guestapi.CreateWatch{Path: "/"}); core.CodeOf(err) != guestapi.CodeWatchLimit {
		t.Errorf("one too many: %v", err)
	}
	const files = 4096/2 + 100 // each is created and removed
	for i := range files {
		name := filepath.Join(dir, itoa(i))
		do(t, os.Mkdir(name, 0o755), os.Remove(name))
	}
	guesttest.Eventually(t, func() bool {
		list := guesttest.Must[guestapi.Watches](t)(guesttest.Ask[guestapi.Watches](a, http.MethodGet, guestapi.PathWatches, nil)).Watches
		i := slices.IndexFunc(list, func(l guestapi.Watch) bool { return l.ID == w.ID })
		return list[i].Last == 2*files
	})
	r := a.events(w.ID, "")
	if e, _ := r.next(); e.Type != guestapi.WatchOverflow || e.Seq != 2*files-4096 {
		t.Errorf("first %+v", e)
	}
	n := 0
	for more := true; more; n++ {
		_, more = r.next()
	}
	if n-1 != 4096 {
		t.Errorf("%d events are kept", n-1)
	}
}

// TestPathsOfWatchesAreBounded: all watches together keep 8 MiB of paths of directories, and a watch that ends gives
// back its share.
func TestPathsOfWatchesAreBounded(t *testing.T) {
	t.Parallel()
	require.Root(t)
	const bound = 8 << 20
	a := newTestAgent(t)
	root := t.TempDir()
	for len(root) < 3700 { // so long that few directories are enough
		root = filepath.Join(root, strings.Repeat("d", 250))
	}
	child := func(i int) string { return filepath.Join(root, itoa(1000+i)) }
	// Two watches of this tree fit, and then a few of its root alone.
	dirs := (bound/2 - len(root)) / len(child(0))
	do(t, os.MkdirAll(root, 0o755))
	for i := range dirs {
		do(t, os.Mkdir(child(i), 0o755))
	}
	first := a.watch(guestapi.CreateWatch{Path: root, Recursive: true})
	second := a.watch(guestapi.CreateWatch{Path: root, Recursive: true})
	if first.Incomplete || second.Incomplete {
		t.Fatalf("%d directories each are too many: %+v %+v", dirs, first, second)
	}
	left := bound - 2*(len(root)+dirs*len(child(0)))
	for ; left >= len(root); left -= len(root) {
		a.watch(guestapi.CreateWatch{Path: root})
	}
	_, err := guesttest.Ask[guestapi.Watch](a, http.MethodPost, guestapi.PathWatches, guestapi.CreateWatch{Path: root})
	if core.CodeOf(err) != guestapi.CodeWatchLimit || !strings.Contains(err.Error(), "too many directories") {
		t.Fatalf("a path that does not fit in the last %d bytes: %v", left, err)
	}
	if w := a.watch(guestapi.CreateWatch{Path: t.TempDir()}); w.Incomplete {
		t.Errorf("a path that fits: %+v", w)
	}
	_, _, err = a.Do(http.MethodDelete, strings.Replace(guestapi.PathWatch, "{id}", string(first.ID), 1), nil) //nolint:bodyclose // Do has read and closed it
	do(t, err)
	var w guestapi.Watch
	for _, recursive := range []bool{false, true} {
		guesttest.Eventually(t, func() bool { // the watch ends on its own
			w, err = guesttest.Ask[guestapi.Watch](a, http.MethodPost, guestapi.PathWatches, guestapi.CreateWatch{Path: root, Recursive: recursive})
			return err == nil
		})
	}
	if !w.Incomplete { // the first of the two has taken room that the tree needs
		t.Errorf("a tree that does not fit: %+v", w)
	}
}

// TestWatchOfANewFile: that an upload in place empties the file first is no write of a file that was empty.
func TestWatchOfANewFile(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	dir := t.TempDir()
	w := a.watch(guestapi.CreateWatch{Path: dir})
	for _, name := range []string{"new", "new", "next"} {
		if _, err := a.put(filepath.Join(dir, name), own()+"&in_place=1", ""); err != nil {
			t.Fatal(err)
		}
	}
	r := a.events(w.ID, "?follow=1")
	for {
		e, ok := r.next()
		if !ok || e.Type == guestapi.WatchWrite {
			t.Fatalf("%+v", e)
		}
		if e.Type == guestapi.WatchCreate && e.Name == "next" {
			return
		}
	}
}
