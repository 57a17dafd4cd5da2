package pager

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/threads"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// flight is a frame that is being fetched, with the number of its runs that are still missing.
type flight struct {
	done chan struct{}
	left int
}

// errReaderKilled is the answer to a killed thread: the kernel ends the thread only when its read is answered.
var errReaderKilled = errors.New("the thread that reads has been killed")

// killedTick is the interval at which a thread that got a signal and still waits is checked. The kernel reports only
// the first signal, which may have been SIGSTOP.
const killedTick = 200 * time.Millisecond

// ensureFor is ensure for a thread. It gives up when the thread was killed.
func (im *image) ensureFor(signaled <-chan struct{}, thread int, runs []manifest.Run) error {
	come, giveUp := make(chan error, 1), make(chan struct{})
	go func() { come <- im.ensure(giveUp, runs, demandParallel) }()
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

// ensure fetches the whole frames of runs, unless another caller already does, and returns when all are present. It
// tries until the store delivers them; an error is permanent. When giveUp is closed, it makes no new requests.
func (im *image) ensure(giveUp <-chan struct{}, runs []manifest.Run, parallel int) error {
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
		if err == nil { // the fetch of another caller failed
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

// gone returns why the image delivers no more bytes; nil while it does.
func (im *image) gone() error {
	im.mu.Lock()
	defer im.mu.Unlock()
	if im.broken == nil && im.ctx.Err() != nil {
		return errDropped
	}
	return im.broken
}

var errDropped = core.Errorf(core.Unavailable, core.CodeStoreUnavailable, "the image is not served any more")

// claim takes the frames of runs that are missing and that nobody fetches yet. It returns their runs, and the fetches
// of the other frames.
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

// fetch reads claimed runs from the store and releases each claim when its frame arrives.
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
	for _, r := range runs { // the runs that did not arrive
		if f := im.flights[r.Frame]; f != nil {
			delete(im.flights, r.Frame)
			close(f.done)
		}
	}
	im.judge(err)
	return err
}

// write writes verified pages to their places.
func (im *image) write(page int64, b []byte) error {
	n := min(int64(len(b)), im.tree.Size()-page*pageSize)
	if _, err := im.part.WriteAt(b[:n], page*pageSize); err != nil {
		return diskError(err, "image "+im.id+" was not written")
	}
	im.mark(page, len(b)/pageSize)
	return nil
}

// diskError marks an error as one of this host's disk, not of the store.
func diskError(err error, what string) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return core.Wrapf(err, core.Exhausted, core.CodeDiskFull, "%s: the runner's disk is full; delete checkpoints or give its data directory more room", what)
	case errors.Is(err, unix.EIO), errors.Is(err, unix.EROFS):
		return core.Wrapf(err, core.Internal, core.CodeInternal, "%s: the runner's disk is failing: %v", what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// land records the arrival of a run. If it was the last of its frame, the waiters for the frame go on.
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

// judge records the result of the last read. The caller holds mu.
func (im *image) judge(err error) {
	switch {
	case err == nil:
		if im.stalled != nil {
			im.log.Info("an image gets the pages again that it waited for", "image", im.id, "after_ms", core.Milliseconds(time.Since(im.since)))
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
		im.log.Warn("an image now waits for another reason", "image", im.id, "err", err)
		im.changed()
	}
}
