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
	"github.com/coppice-dev/coppice/runner/threads"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

const pageSize = manifest.PageSize

// How it is read: what a machine waits for at once, and the rest in portions, behind that.
const (
	demandParallel = 8
	restParallel   = 4
	restPortion    = 4 << 20 // bytes of pages
	quiet          = time.Second
	quietAtMost    = 15 * time.Second // the rest does not wait longer than this for the machines to be quiet
	firstRetry     = 100 * time.Millisecond
	lastRetry      = 5 * time.Second
)

// image is one image that is being fetched, or is whole and still in use. It is safe for concurrent use.
type image struct {
	id    string
	tree  *manifest.Tree
	part  *os.File // of the image's size; pages that are present are here
	blobs blob.Blobs
	log   *slog.Logger
	ino   uint64
	inode uint64 // of part

	ctx  context.Context // ends when it is dropped
	stop context.CancelFunc

	present  []atomic.Uint64 // a bit for each page whose bytes are in part, zeros as a hole
	here     atomic.Int64    // how many
	lastMiss *atomic.Int64   // when a page of any image was last asked for that was not here, in ns since the epoch
	opened   atomic.Int64
	demanded atomic.Int64 // pages that were asked for before they were here
	fetched  atomic.Int64 // bytes that the store has given
	requests atomic.Int64
	whole    atomic.Bool
	taken    atomic.Bool // whoever has put it has what is whole
	changed  func()      // the status is another; it may be called with mu held

	memory bool        // see Image, as for the next two
	record bool        //
	want   []Range     //
	wanted atomic.Bool // want is here
	pushed atomic.Bool // and in the kernel's cache, or on its way there

	mu       sync.Mutex // guards what follows
	flights  map[*manifest.Frame]*flight
	broken   error // what is damaged in the store; nothing more is shown
	stalled  error // why the last read has failed; nil when one has succeeded since
	since    time.Time
	touched  []int64 // pages that were asked for before they were here, in order
	released bool    // nobody waits for touched any more
	waits    map[*Waiter]bool
}

// flight is a frame that is being fetched, with how many of its runs are still to come.
type flight struct {
	done chan struct{}
	left int
}

// newImage shows an image whose bytes are in the store by tree. The values of ctx are those of its reads. seed is the map of what part holds already, nil for nothing. Part has
// the image's size.
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

// read fills dest with the image's bytes from off on, for a thread. It returns when they are here, however long that takes; an error is of an
// image that is damaged or was dropped, or of a thread that was killed. signaled is closed when the thread gets a first signal.
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
		if err := im.bringFor(signaled, thread, im.runsOf(first, last)); err != nil {
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

// wait remembers that a thread waits for the first of some pages that is not here, and tells whoever watches if it does so for long.
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

// waiters are the threads that have waited for a while, each once, the oldest first, and how many there are. The caller holds mu.
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

// note records what is asked for and not here, or, where all is recorded, what is asked for.
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

// runsOf are the runs of the frames that the pages are in, as far as they lie in the same leaf: the frame is fetched anyway.
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

// place is a leaf and a frame that pages of it are in. A frame may have pages of two leaves.
type place struct {
	leaf  int64
	frame *manifest.Frame
}

func (im *image) place(page int64) place {
	return place{page / manifest.LeafPages, im.tree.At(page).Frame}
}

// frameRuns are the runs of the leaf of a page that are in the page's frame.
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

// errReaderKilled is the answer to a thread that has been killed: the kernel lets it end only when its read is answered.
var errReaderKilled = errors.New("the thread that reads has been killed")

// killedTick is how often a thread that got a signal and still waits is looked at. The kernel tells of the first signal only, and that
// may have been SIGSTOP.
const killedTick = 200 * time.Millisecond

// bringFor is bring for a thread. It gives up when the thread has been killed.
func (im *image) bringFor(signaled <-chan struct{}, thread int, runs []manifest.Run) error {
	come, giveUp := make(chan error, 1), make(chan struct{})
	go func() { come <- im.bring(giveUp, runs, demandParallel) }()
	var look <-chan time.Time
	for {
		select {
		case err := <-come:
			return err
		case <-signaled:
			signaled = nil
			tick := time.NewTicker(killedTick)
			defer tick.Stop()
			look = tick.C
		case <-look:
		}
		if threads.Killed(thread) {
			close(giveUp)
			return errReaderKilled
		}
	}
}

// bring fetches runs, whole frames of them, unless somebody does already, and returns when all are here. It tries until the store gives
// them; an error is for good. When giveUp is closed it ends with what is under way.
func (im *image) bring(giveUp <-chan struct{}, runs []manifest.Run, parallel int) error {
	wait := firstRetry
	for {
		mine, others := im.claim(runs)
		err := im.fetch(mine, parallel)
		for _, f := range others {
			select {
			case <-f.done:
			case <-giveUp:
				return errReaderKilled
			}
		}
		if err == nil && !slices.ContainsFunc(runs, func(r manifest.Run) bool { return im.lacks(r.Page, r.Page+int64(r.Count)-1) }) {
			return nil
		}
		if err := im.gone(); err != nil {
			return err
		}
		if err == nil { // somebody else has failed
			continue
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-giveUp:
			t.Stop()
			return errReaderKilled
		case <-im.ctx.Done():
			t.Stop()
			return im.gone()
		}
		wait = min(2*wait, lastRetry)
	}
}

// gone is why the image gives nothing any more, nil while it does.
func (im *image) gone() error {
	im.mu.Lock()
	defer im.mu.Unlock()
	if im.broken == nil && im.ctx.Err() != nil {
		return errDropped
	}
	return im.broken
}

var errDropped = core.Errorf(core.Unavailable, core.CodeStoreUnavailable, "the image is not served any more")

// claim takes the frames of runs that are not here and nobody fetches, and returns their runs and who fetches the others.
func (im *image) claim(runs []manifest.Run) (mine []manifest.Run, others []*flight) {
	im.mu.Lock()
	defer im.mu.Unlock()
	own := make(map[*manifest.Frame]*flight)
	for _, r := range runs {
		if !im.lacks(r.Page, r.Page+int64(r.Count)-1) {
			continue
		}
		if f := own[r.Frame]; f != nil {
			f.left++
			mine = append(mine, r)
		} else if f := im.flights[r.Frame]; f != nil {
			others = append(others, f)
		} else {
			f := &flight{done: make(chan struct{}), left: 1}
			own[r.Frame], im.flights[r.Frame] = f, f
			mine = append(mine, r)
		}
	}
	return mine, others
}

// fetch reads claimed runs from the store and gives the claims back, frame by frame as they come.
func (im *image) fetch(runs []manifest.Run, parallel int) error {
	if len(runs) == 0 {
		return nil
	}
	got, err := snapshotstore.Fetch(im.ctx, im.blobs, slices.Values(runs), snapshotstore.FetchOptions{Parallel: parallel}, func(page int64, b []byte) error {
		if err := im.write(page, b); err != nil {
			return err
		}
		im.land(page)
		return nil
	})
	im.fetched.Add(got.Bytes)
	im.requests.Add(got.Requests)
	im.mu.Lock()
	defer im.mu.Unlock()
	for _, r := range runs { // what has not come
		if f := im.flights[r.Frame]; f != nil {
			delete(im.flights, r.Frame)
			close(f.done)
		}
	}
	im.judge(err)
	return err
}

// write puts pages where they belong. They have been verified.
func (im *image) write(page int64, b []byte) error {
	n := min(int64(len(b)), im.tree.Size()-page*pageSize)
	if _, err := im.part.WriteAt(b[:n], page*pageSize); err != nil {
		return diskError(err, "image "+im.id+" was not written")
	}
	im.mark(page, len(b)/pageSize)
	return nil
}

// diskError says of an error of this host's disk what it is: not the store's.
func diskError(err error, what string) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return core.Wrapf(err, core.Exhausted, core.CodeDiskFull, "%s: the runner's disk is full; delete checkpoints or give its data directory more room", what)
	case errors.Is(err, unix.EIO), errors.Is(err, unix.EROFS):
		return core.Wrapf(err, core.Internal, core.CodeInternal, "%s: the runner's disk is failing: %v", what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// land lets go who waits for the frame of a run that has come, if it was the last of the frame's.
func (im *image) land(page int64) {
	frame := im.tree.At(page).Frame
	im.mu.Lock()
	defer im.mu.Unlock()
	f := im.flights[frame]
	if f == nil {
		return
	}
	if f.left--; f.left <= 0 {
		delete(im.flights, frame)
		close(f.done)
	}
}

// judge remembers how the last read went. The caller holds mu.
func (im *image) judge(err error) {
	switch {
	case err == nil:
		if im.stalled != nil {
			im.log.Info("an image gets again what it waited for", "image", im.id, "after_ms", core.Milliseconds(time.Since(im.since)))
			im.stalled = nil
			im.changed()
		}
	case im.ctx.Err() != nil:
	case core.CategoryOf(err) == core.DataLoss:
		if im.broken == nil {
			im.broken = err
			im.log.Error("an image is damaged in the store", "image", im.id, "err", err)
			im.changed()
		}
	case im.stalled == nil:
		im.stalled, im.since = err, time.Now()
		im.log.Warn("an image waits for the store, or for this host's disk", "image", im.id, "err", err)
		im.changed()
	case core.CodeOf(im.stalled) != core.CodeOf(err): // it waits for something else now
		im.stalled = err
		im.log.Warn("an image waits for another reason", "image", im.id, "err", err)
		im.changed()
	}
}

// run brings first the pages of want, and then everything, and makes it durable. It ends when the image is whole, damaged or dropped.
func (im *image) run() {
	begun := time.Now()
	if err := im.bring(nil, im.wantedRuns(), demandParallel); err != nil {
		return
	}
	if len(im.want) > 0 {
		im.wanted.Store(true)
		im.log.Info("what an image's machines use first is here", "image", im.id, "duration_ms", core.Milliseconds(time.Since(begun)), "ranges", len(im.want),
			"demanded_pages", im.demanded.Load(), "bytes", im.fetched.Load(), "requests", im.requests.Load())
	}
	for page := int64(0); page < im.tree.Pages(); {
		im.giveWay(begun)
		var portion []manifest.Run
		portion, page = im.portion(page)
		if im.bring(nil, portion, restParallel) != nil {
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
	im.log.Info("image is whole", "image", im.id, "duration_ms", core.Milliseconds(time.Since(begun)), "demanded_pages", im.demanded.Load(),
		"bytes", im.fetched.Load(), "requests", im.requests.Load(), "err", err)
	im.changed()
}

// wantedRuns are the runs of the frames that the pages of want are in.
func (im *image) wantedRuns() []manifest.Run {
	var out []manifest.Run
	seen := make(map[place]bool)
	left := im.tree.Pages() // ranges that overlap are looked at no more often than the image has pages
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

// giveWay waits while machines ask for pages: those come first.
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

// portion is what lacks from a page on, up to the end of a leaf, and where to go on.
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

// clearZeros makes zeros of what a seed has and the image has not.
func clearZeros(part *os.File, tree, seed *manifest.Tree) error {
	for r := range tree.Changed(seed) {
		if r.Frame != nil {
			continue
		}
		if err := unix.Fallocate(int(part.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, r.Page*pageSize, int64(r.Count)*pageSize); err != nil {
			return diskError(err, "zeros were not made of what an image has not")
		}
	}
	return nil
}

// status says how it stands.
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

// touchedRanges are the pages that were asked for before they were here, as ranges in order.
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

// close lets go of it: who waits is told.
func (im *image) close() error {
	im.stop()
	if err := im.part.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}
