package pager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

const pageSize = manifest.PageSize

// How an image is read: pages that a machine waits for at once; the rest in portions, after those.
const (
	demandParallel = 8
	restParallel   = 4
	restPortion    = 4 << 20 // bytes of pages
	quiet          = time.Second
	quietAtMost    = 15 * time.Second // maximum time for which the rest waits until the machines are quiet
	firstRetry     = 100 * time.Millisecond
	lastRetry      = 5 * time.Second
)

// image is an image that is being fetched, or is complete and still in use. It is safe for concurrent use.
type image struct {
	id    string
	tree  *manifest.Tree
	part  *os.File // file of the image's size, with the pages that are present
	blobs blob.Blobs
	log   *slog.Logger
	ino   uint64
	inode uint64 // of part

	ctx  context.Context // ends when the image is dropped
	stop context.CancelFunc

	present  []atomic.Uint64 // a bit for each page whose bytes are in part; a page of zeros is a hole there
	here     atomic.Int64    // number of present pages
	lastMiss *atomic.Int64   // when a missing page of any image was last read, in ns since the epoch
	opened   atomic.Int64
	demanded atomic.Int64 // pages that were read before they were present
	fetched  atomic.Int64 // bytes received from the store
	requests atomic.Int64
	whole    atomic.Bool
	taken    atomic.Bool // the runner has taken the complete file
	changed  func()      // called when the status has changed, possibly with mu held

	memory bool        // see Image, also for record and want
	record bool        //
	want   []Range     //
	wanted atomic.Bool // all pages of want are present
	pushed atomic.Bool // they are in the kernel's cache, or will soon be

	mu       sync.Mutex // guards the fields below
	flights  map[*manifest.Frame]*flight
	broken   error // the damage in the store; no more bytes are shown
	stalled  error // why the last read failed; nil after a success
	since    time.Time
	touched  []int64 // pages that were read before they were present, in order
	released bool    // touched is no longer recorded
	waits    map[*Waiter]bool
}

// newImage makes an image whose bytes tree finds in the store. Its reads use the values of ctx. seed is the map of the
// bytes that part already has; nil if it has none. Part has the image's size.
func newImage(ctx context.Context, id string, tree, seed *manifest.Tree, part *os.File, inode, ino uint64, blobs blob.Blobs, log *slog.Logger, lastMiss *atomic.Int64, changed func()) *image {
	im := &image{
		id: id, tree: tree, part: part, blobs: blobs, log: log, inode: inode, ino: ino, lastMiss: lastMiss, changed: changed, present: make([]atomic.Uint64, (tree.Pages()+63)/64),
		flights: make(map[*manifest.Frame]*flight), waits: make(map[*Waiter]bool),
	}
	im.ctx, im.stop = context.WithCancel(context.WithoutCancel(ctx))
	missing := tree.Runs()
	if seed != nil {
		missing = tree.Changed(seed)
	}
	for i := range im.present {
		im.present[i].Store(^uint64(0))
	}
	here := tree.Pages()
	for r := range missing {
		if r.Frame == nil {
			continue // see clearZeros
		}
		for p := r.Page; p < r.Page+int64(r.Count); p++ {
			im.present[p/64].And(^(1 << (p % 64)))
		}
		here -= int64(r.Count)
	}
	im.here.Store(here)
	return im
}

func (im *image) has(page int64) bool { return im.present[page/64].Load()&(1<<(page%64)) != 0 }

func (im *image) mark(first int64, n int) {
	var fresh int64
	for p := first; p < first+int64(n); p++ {
		if old := im.present[p/64].Or(1 << (p % 64)); old&(1<<(p%64)) == 0 {
			fresh++
		}
	}
	im.here.Add(fresh)
}

// read fills dest with the image's bytes from off on, for a thread. It waits until they are present, however long that
// takes. It returns an error if the image is damaged or was dropped, or if the thread was killed. signaled is closed
// when the thread gets a first signal.
func (im *image) read(signaled <-chan struct{}, dest []byte, off int64, thread int) error {
	if end := im.tree.Size(); off >= end {
		return nil
	} else if off+int64(len(dest)) > end {
		dest = dest[:end-off]
	}
	first, last := off/pageSize, (off+int64(len(dest))-1)/pageSize
	if im.record {
		im.note(first, last)
	}
	if im.lacks(first, last) {
		im.lastMiss.Store(time.Now().UnixNano())
		defer im.wait(first, last, thread)()
		im.note(first, last)
		if err := im.ensureFor(signaled, thread, im.runsOf(first, last)); err != nil {
			return err
		}
		im.lastMiss.Store(time.Now().UnixNano())
	}
	n, err := im.part.ReadAt(dest, off)
	if n < len(dest) {
		return fmt.Errorf("read image %s: %w", im.id, err)
	}
	return nil
}

func (im *image) lacks(first, last int64) bool {
	for p := first; p <= last; p++ {
		if !im.has(p) {
			return true
		}
	}
	return false
}

// wait records that a thread waits for the first of some pages that is missing. If it waits for long, watchers are
// told.
func (im *image) wait(first, last int64, thread int) (end func()) {
	w := &Waiter{Thread: thread, Since: time.Now()}
	for p := first; p <= last; p++ {
		if frame := im.tree.At(p).Frame; frame != nil && !im.has(p) {
			w.Object = core.ClipText(frame.Object, maxObject)
			break
		}
	}
	im.mu.Lock()
	im.waits[w] = true
	im.mu.Unlock()
	notice := time.AfterFunc(waitNotice, im.changed)
	return func() {
		im.mu.Lock()
		delete(im.waits, w)
		im.mu.Unlock()
		if !notice.Stop() {
			im.changed()
		}
	}
}

// waiters returns the threads that have waited for a while, each once and the oldest first, and their number. The
// caller holds mu.
func (im *image) waiters() (list []Waiter, all int) {
	var out []Waiter
	for w := range im.waits {
		if time.Since(w.Since) >= waitNotice {
			out = append(out, *w)
		}
	}
	slices.SortFunc(out, func(a, b Waiter) int { return a.Since.Compare(b.Since) })
	seen := make(map[int]bool)
	out = slices.DeleteFunc(out, func(w Waiter) bool {
		again := seen[w.Thread]
		seen[w.Thread] = true
		return again
	})
	return out[:min(len(out), maxWaiters)], len(out)
}

// maxTouched bounds the record of touched pages: 256 MiB of memory.
const maxTouched = 64 << 10

// note records missing pages that are read or, if the image is recorded, all pages that are read.
func (im *image) note(first, last int64) {
	im.mu.Lock()
	defer im.mu.Unlock()
	for p := first; p <= last; p++ {
		if im.record || !im.has(p) {
			im.demanded.Add(1)
			if !im.released && len(im.touched) < maxTouched {
				im.touched = append(im.touched, p)
			}
		}
	}
}

// runsOf returns the runs of the frames that contain the pages, within the same leaf: each frame is fetched as a whole
// anyway.
func (im *image) runsOf(first, last int64) []manifest.Run {
	var out []manifest.Run
	seen := make(map[place]bool)
	for p := first; p <= last; p++ {
		if at := im.place(p); !im.has(p) && !seen[at] {
			seen[at] = true
			out = append(out, im.frameRuns(p)...)
		}
	}
	return out
}

// place is a frame together with a leaf that has pages in it. A frame may have pages of two leaves.
type place struct {
	leaf  int64
	frame *manifest.Frame
}

func (im *image) place(page int64) place {
	return place{page / manifest.LeafPages, im.tree.At(page).Frame}
}

// frameRuns returns the runs of a page's leaf that are in the page's frame.
func (im *image) frameRuns(page int64) []manifest.Run {
	var out []manifest.Run
	frame := im.tree.At(page).Frame
	leaf := page / manifest.LeafPages * manifest.LeafPages
	for p := leaf; p < leaf+manifest.LeafPages && p < im.tree.Pages(); p++ {
		s := im.tree.At(p)
		if s.Frame != frame {
			continue
		}
		if n := len(out); n > 0 && out[n-1].Page+int64(out[n-1].Count) == p && out[n-1].Slot+out[n-1].Count == s.Index {
			out[n-1].Count++
			continue
		}
		out = append(out, manifest.Run{Page: p, Count: 1, Frame: frame, Slot: s.Index})
	}
	return out
}

// run first fetches the pages of want, then everything else, and makes the image durable. It ends when the image is
// complete, damaged or dropped.
func (im *image) run() {
	begun := time.Now()
	if err := im.ensure(nil, im.wantedRuns(), demandParallel); err != nil {
		return
	}
	if len(im.want) > 0 {
		im.wanted.Store(true)
		im.log.Info("the pages that machines of an image use first are present", "image", im.id, "duration_ms", core.Milliseconds(time.Since(begun)), "ranges", len(im.want),
			"demanded_pages", im.demanded.Load(), "bytes", im.fetched.Load(), "requests", im.requests.Load())
	}
	for page := int64(0); page < im.tree.Pages(); {
		im.giveWay(begun)
		var portion []manifest.Run
		portion, page = im.portion(page)
		if im.ensure(nil, portion, restParallel) != nil {
			return
		}
	}
	err := im.part.Sync()
	im.mu.Lock()
	defer im.mu.Unlock()
	if err != nil {
		im.broken = fmt.Errorf("sync image %s: %w", im.id, err)
	} else {
		im.whole.Store(true)
	}
	im.log.Info("image is complete", "image", im.id, "duration_ms", core.Milliseconds(time.Since(begun)), "demanded_pages", im.demanded.Load(),
		"bytes", im.fetched.Load(), "requests", im.requests.Load(), "err", err)
	im.changed()
}

// wantedRuns returns the runs of the frames that contain the pages of want.
func (im *image) wantedRuns() []manifest.Run {
	var out []manifest.Run
	seen := make(map[place]bool)
	left := im.tree.Pages() // overlapping ranges cost no more steps than the image has pages
	for _, r := range im.want {
		for p := max(r.First, 0); p < r.First+r.Count && p < im.tree.Pages() && left > 0; p++ {
			left--
			if at := im.place(p); !im.has(p) && !seen[at] {
				seen[at] = true
				out = append(out, im.frameRuns(p)...)
			}
		}
	}
	return out
}

// giveWay waits while machines read pages, because those come first.
func (im *image) giveWay(begun time.Time) {
	for time.Since(begun) < quietAtMost {
		wait := max(quiet-time.Since(begun), quiet-time.Since(time.Unix(0, im.lastMiss.Load())))
		if wait <= 0 {
			return
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-im.ctx.Done():
			t.Stop()
			return
		}
	}
}

// portion returns the missing runs from a page on, up to the end of a leaf, and the page where to go on.
func (im *image) portion(page int64) ([]manifest.Run, int64) {
	var out []manifest.Run
	seen := make(map[place]bool)
	var pages int64
	for page < im.tree.Pages() && pages < restPortion/pageSize {
		if page%64 == 0 && bits.OnesCount64(im.present[page/64].Load()) == 64 {
			page += 64
			continue
		}
		if at := im.place(page); !im.has(page) && !seen[at] {
			seen[at] = true
			runs := im.frameRuns(page)
			out = append(out, runs...)
			for _, r := range runs {
				pages += int64(r.Count)
			}
		}
		page++
	}
	return out, page
}

// clearZeros makes holes of the pages that a seed has and the image does not have.
func clearZeros(part *os.File, tree, seed *manifest.Tree) error {
	for r := range tree.Changed(seed) {
		if r.Frame != nil {
			continue
		}
		if err := unix.Fallocate(int(part.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, r.Page*pageSize, int64(r.Count)*pageSize); err != nil {
			return diskError(err, "pages of the seed that the image does not have were not cleared")
		}
	}
	return nil
}

// status returns the present status.
func (im *image) status() Status {
	im.mu.Lock()
	defer im.mu.Unlock()
	s := Status{
		ID: im.id, Pages: im.tree.Pages(), Here: im.here.Load(), Whole: im.whole.Load(), Opened: im.opened.Load(), Demanded: im.demanded.Load(),
		Bytes: im.fetched.Load(), Requests: im.requests.Load(), Inode: im.ino, Part: im.inode, Taken: im.taken.Load(), Record: im.record,
	}
	s.Waiters, s.Waiting = im.waiters()
	err := im.broken
	if err == nil && im.stalled != nil {
		err, s.Stalled = im.stalled, im.since
	}
	if err != nil {
		s.Problem = problemOf(err)
		s.Problem.Message = core.ClipText(s.Problem.Message, maxProblem)
	}
	return s
}

// touchedRanges returns the pages that were read before they were present, as ranges in order.
func (im *image) touchedRanges() []Range {
	im.mu.Lock()
	pages := slices.Clone(im.touched)
	im.mu.Unlock()
	slices.Sort(pages)
	var out []Range
	for _, p := range slices.Compact(pages) {
		if n := len(out); n > 0 && out[n-1].First+out[n-1].Count == p {
			out[n-1].Count++
		} else {
			out = append(out, Range{p, 1})
		}
	}
	return out
}

// close ends the image; its waiters get an error.
func (im *image) close() error {
	im.stop()
	if err := im.part.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}
