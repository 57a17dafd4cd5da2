package runner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// findPager looks for the pager of an earlier process, and starts one if anything needs it: machines that were left, or images that are not
// whole.
func (r *Runner) findPager(ctx context.Context, left []leftover) {
	needed := len(r.lazy.images) > 0
	for _, l := range left {
		needed = needed || l.journal != nil && l.journal.Pager != ""
	}
	if cfg := r.cfg.Store.Pager; !needed && (cfg == nil || !pager.Runs(ctx, *cfg)) {
		return
	}
	if err := r.lazy.start(ctx); err != nil {
		r.cfg.Log.ErrorContext(ctx, "there is no pager to go on with images that are being fetched", "err", err)
	}
}

// start makes sure that a pager runs; run has it serve what is not whole.
func (l *lazyImages) start(ctx context.Context) error {
	if l.r.cfg.Store.Pager == nil {
		return core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "this runner has no pager")
	}
	client, fresh, err := pager.Ensure(ctx, *l.r.cfg.Store.Pager)
	if err != nil {
		return err
	}
	hello, err := client.Hello(ctx)
	if err != nil {
		return err
	}
	if fresh && hello.Foreign() {
		return errors.Join(core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "this runner's program was replaced by one of another version; restart the runner"), client.Stop(ctx))
	}
	l.mu.Lock()
	l.client, l.instance, l.foreign = client, hello.Instance, hello.Foreign()
	images := len(l.images)
	l.changed()
	l.mu.Unlock()
	l.r.cfg.Log.InfoContext(ctx, "pager is there", "pid", hello.PID, "new", fresh, "images", images)
	if hello.Foreign() {
		l.r.cfg.Log.WarnContext(ctx, "the pager is of another version: machines that have memory from it go on, and checkpoints are fetched whole until they have ended", "pid", hello.PID)
	}
	return nil
}

// run watches the pager until ctx ends. When it has ended, so do the machines that had memory from it, and another is started for what is not
// whole.
func (l *lazyImages) run(ctx context.Context) {
	const firstWait, lastWait = time.Second, time.Minute
	wait, deaf := firstWait, firstWait
	for ctx.Err() == nil {
		l.mu.Lock()
		client, instance, news, images := l.client, l.instance, l.news, slices.Collect(maps.Values(l.images))
		l.mu.Unlock()
		switch {
		case client != nil:
			wait = firstWait
			began := time.Now()
			switch err := l.attend(ctx, client, instance, images); {
			case ctx.Err() != nil:
			case errors.Is(err, errIdle):
				l.retire(ctx, client)
			case client.Alive(ctx, instance): // its machines go on, whatever was wrong with a message or a connection
				if l.unheard.Add(1); time.Since(began) > lastWait {
					deaf = firstWait
				}
				l.r.cfg.Log.ErrorContext(ctx, "the pager runs, but its report on images was not received; it is asked again", "again_ms", core.Milliseconds(deaf), "err", err)
				pause(ctx, deaf)
				deaf = min(2*deaf, lastWait)
				continue
			default:
				if errors.Is(err, pager.ErrHung) {
					l.hung.Add(1)
				}
				l.died(ctx, err)
			}
			deaf = firstWait
			continue
		case len(images) > 0:
			err := l.start(ctx)
			if err == nil {
				continue
			}
			l.r.cfg.Log.ErrorContext(ctx, "no pager was started, and what is not whole cannot be forked", "err", err)
		}
		again := time.NewTimer(wait)
		select {
		case <-news:
		case <-again.C:
			wait = min(2*wait, lastWait)
		case <-ctx.Done():
		}
		again.Stop()
	}
}

// attend offers images to a pager and listens to it, until it ends or ctx does.
func (l *lazyImages) attend(ctx context.Context, client *pager.Client, instance string, images []*lazyImage) error {
	offering, stop := context.WithCancel(ctx)
	var offers sync.WaitGroup
	defer offers.Wait()
	defer stop()
	for _, im := range images {
		offers.Go(func() { l.offer(offering, client, instance, im) })
	}
	l.mu.Lock()
	foreign := l.foreign
	l.mu.Unlock()
	watching, idle := context.WithCancelCause(ctx)
	defer idle(nil)
	return client.Attend(watching, func(list []pager.Status) {
		l.heard(ctx, client, list)
		if foreign && len(list) == 0 {
			idle(errIdle)
		}
	})
}

// errIdle is of a pager of another version that serves nothing any more.
var errIdle = errors.New("the pager serves nothing")

// errForeign is of an image that is put to no pager, because the one that runs is of another version.
var errForeign = core.Errorf(core.Unavailable, core.CodePagerGone,
	"the pager of this runner is of another version of Coppice and takes nothing new; another is started when no VM has memory from it")

// retire ends a pager of another version that serves nothing. What it is offered it does not take, so nobody can come to need it.
func (l *lazyImages) retire(ctx context.Context, client *pager.Client) {
	if err := client.Stop(ctx); err != nil && !errors.Is(err, pager.ErrGone) {
		l.r.cfg.Log.WarnContext(ctx, "the pager of another version was not ended", "err", err)
		pause(ctx, time.Second)
		return
	}
	l.mu.Lock()
	l.client, l.instance, l.foreign = nil, "", false
	l.changed()
	l.mu.Unlock()
	l.r.cfg.Log.InfoContext(ctx, "the pager of another version serves nothing and was ended")
}

// offer has a pager serve an image, unless it does. It tries until the pager takes it, the image is of no use any more, or ctx ends.
func (l *lazyImages) offer(ctx context.Context, client *pager.Client, instance string, im *lazyImage) {
	for wait := firstOffer; ; wait = min(2*wait, lastOffer) {
		l.mu.Lock()
		keyed := l.keyed
		l.mu.Unlock()
		there, err := l.serve(ctx, client, instance, im)
		if ctx.Err() != nil || !there {
			return
		}
		l.mu.Lock()
		im.refused = err
		l.changed()
		l.mu.Unlock()
		if err == nil {
			return
		}
		l.r.cfg.Log.WarnContext(ctx, "the pager has not taken an image; it is offered again", "image", im.ID, "again_ms", core.Milliseconds(wait), "err", err)
		again := time.NewTimer(wait)
		select {
		case <-again.C:
		case <-keyed:
			again.Stop()
		case <-ctx.Done():
			again.Stop()
			return
		}
	}
}

// wake has what was not taken offered now: there may be keys that were lacking.
func (l *lazyImages) wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.keyed)
	l.keyed = make(chan struct{})
}

// How long an image that was not taken is not offered.
const (
	firstOffer = time.Second
	lastOffer  = time.Minute
)

// serve has a pager serve an image, unless it does. there is false for one that is of no use any more.
func (l *lazyImages) serve(ctx context.Context, client *pager.Client, instance string, im *lazyImage) (there bool, err error) {
	im.serving.Lock()
	defer im.serving.Unlock()
	known := func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.images[im.ID] == im
	}
	if !known() {
		return false, nil
	}
	f, err := client.Open(ctx, im.ID)
	if err == nil {
		return true, f.Close()
	}
	if core.CategoryOf(err) != core.NotFound {
		return true, err
	}
	l.mu.Lock()
	foreign := l.foreign
	l.mu.Unlock()
	if foreign {
		return true, errForeign
	}
	if err := l.put(ctx, client, instance, im); err != nil || known() {
		return true, err
	}
	return false, errors.Join(client.Drop(ctx, im.ID), l.erase(im.ID)) // it was dropped meanwhile
}

// put gives an image to a pager, with its part. The caller holds its serving.
func (l *lazyImages) put(ctx context.Context, client *pager.Client, instance string, im *lazyImage) (err error) {
	var part *os.File
	if im.Made == instance {
		part, err = os.OpenFile(filepath.Join(l.dir, im.ID+lazyPart), os.O_RDWR, 0)
	} else {
		part, err = l.makePart(im)
	}
	if err != nil {
		return err
	}
	defer part.Close()
	if im.Made != instance {
		im.Made = instance
		if err := atomicfile.WriteJSON(filepath.Join(l.dir, im.ID+lazyRecord), im, 0o600); err != nil {
			im.Made = ""
			return err
		}
	}
	if err := client.Keys(ctx, l.r.keys.Keys()); err != nil {
		return err
	}
	_, err = client.Put(ctx, im.Image, part)
	return err
}

// makePart makes the file of an image anew, with the seed's bytes if there are any.
func (l *lazyImages) makePart(im *lazyImage) (_ *os.File, err error) {
	path := filepath.Join(l.dir, im.ID+lazyPart)
	if err := ignoreAbsent(os.Remove(path)); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if im.SeedBase != "" {
		seed, err := l.r.bases.OpenFile(im.SeedBase)
		if err == nil {
			_, err = sparse.Clone(f, seed)
			err = errors.Join(err, seed.Close())
		} else if core.CodeOf(err) == core.CodeCheckpointCorrupt { // it was removed: everything comes from the store
			im.Seed, im.SeedBase, err = nil, "", nil
		}
		if err != nil {
			return f, err
		}
	}
	return f, f.Truncate(im.Size)
}

// heard takes what the pager says.
func (l *lazyImages) heard(ctx context.Context, client *pager.Client, list []pager.Status) {
	var done, damaged []*lazyImage
	var strange []pager.Status
	l.mu.Lock()
	for _, st := range list {
		im := l.images[st.ID]
		if im == nil {
			if !l.rehearsed[st.ID] {
				strange = append(strange, st)
			}
			continue
		}
		if st.Damaged() && !im.status.Damaged() {
			damaged = append(damaged, im)
		}
		if st.Problem != nil && im.status.Problem == nil && !st.Damaged() {
			l.r.cfg.Log.WarnContext(ctx, "machines wait where they touch memory that is not here yet", "image", st.ID, "problem", st.Problem.Message)
		}
		im.status = st
		im.room.Left(min((st.Pages-st.Here)*manifest.PageSize, im.Reserved))
		if st.Whole {
			done = append(done, im)
		}
	}
	l.changed()
	l.mu.Unlock()
	for _, im := range damaged {
		l.r.endUsers(ctx, im.status.Problem.Message, func(s *shell) bool { return s.uses(im.ID) })
	}
	for _, im := range done {
		if err := l.publish(ctx, client, im); err != nil {
			l.r.cfg.Log.ErrorContext(ctx, "an image that is whole was not taken", "image", im.ID, "err", err)
		}
	}
	for _, st := range strange {
		if err := l.letGo(ctx, client, st); err != nil && !errors.Is(err, pager.ErrGone) {
			l.r.cfg.Log.WarnContext(ctx, "the pager serves an image that nothing needs", "image", st.ID, "err", err)
		}
	}
}

// letGo tells the pager what to do with an image that is not awaited: it was taken, or nothing needs it. What machines have open they keep.
func (l *lazyImages) letGo(ctx context.Context, client *pager.Client, st pager.Status) error {
	switch {
	case st.Whole && st.Taken:
		return nil // it ends by itself
	case st.Whole:
		return client.Taken(ctx, st.ID)
	case st.Opened == 0:
		return client.Drop(ctx, st.ID)
	}
	return nil
}

// publish makes the part of a whole image the file that it was for. That part, and no other, is what the pager has written.
func (l *lazyImages) publish(ctx context.Context, client *pager.Client, im *lazyImage) error {
	part := filepath.Join(l.dir, im.ID+lazyPart)
	var is unix.Stat_t
	if err := unix.Stat(part, &is); err != nil {
		return fmt.Errorf("examine the part of image %s: %w", im.ID, err)
	}
	if is.Ino != im.status.Part {
		return core.Errorf(core.Internal, core.CodeInternal, "the pager has filled another file (inode %d) than the part of image %s (inode %d)", im.status.Part, im.ID, is.Ino)
	}
	if err := os.Chmod(part, 0o444); err != nil { //nolint:gosec // G302: VMMs, other users, read it
		return err
	}
	if err := atomicfile.Rename(part, filepath.Join(l.r.cfg.DataDir, im.To)); err != nil {
		return err
	}
	l.forget(im)
	return errors.Join(l.erase(im.ID), client.Taken(ctx, im.ID))
}

// died is called when the pager has ended.
func (l *lazyImages) died(ctx context.Context, cause error) {
	l.mu.Lock()
	instance := l.instance
	l.client, l.instance = nil, ""
	for _, im := range l.images {
		im.status = pager.Status{}
	}
	l.changed()
	l.mu.Unlock()
	l.r.cfg.Log.ErrorContext(ctx, "the pager has ended", "err", cause)
	l.r.bases.ForgetArriving()
	l.r.warm.purge(ctx, func(s *shell) bool { return s.Pager == instance })
	l.r.endUsers(ctx, "the pager of its runner ended, and with it memory that it had from there", func(s *shell) bool { return s.Pager == instance })
}

// stop ends the pager, which nobody uses any more.
func (l *lazyImages) stop(ctx context.Context) error {
	l.mu.Lock()
	client := l.client
	l.client, l.instance = nil, ""
	l.mu.Unlock()
	if l.r.cfg.Store.Pager == nil {
		return nil
	}
	if client != nil {
		if err := client.Stop(ctx); err != nil && !errors.Is(err, pager.ErrGone) {
			return fmt.Errorf("stop the pager: %w", err)
		}
	}
	return pager.Clean(l.r.cfg.Store.Pager.Dir)
}
