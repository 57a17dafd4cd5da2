package lazy

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
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// FindPager looks for the pager of an earlier runner. If there is none, it starts one if the caller says that machines need it, or if
// some images are not complete.
func (l *Images) FindPager(ctx context.Context, needed bool) {
	needed = needed || len(l.images) > 0
	if p := l.cfg.Pager; !needed && (p == nil || !pager.Runs(ctx, *p)) {
		return
	}
	if err := l.start(ctx); err != nil {
		l.cfg.Log.ErrorContext(ctx, "there is no pager that could continue to fetch images", "err", err)
	}
}

// start makes sure that a pager runs. Run offers the images to it.
func (l *Images) start(ctx context.Context) error {
	if l.cfg.Pager == nil {
		return core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "this runner has no pager")
	}
	client, fresh, err := pager.Ensure(ctx, *l.cfg.Pager)
	if err != nil {
		return err
	}
	hello, err := client.Hello(ctx)
	if err != nil {
		return err
	}
	if fresh && hello.Foreign() {
		return errors.Join(core.Errorf(core.FailedPrecondition, core.CodeUnsupported,
			"this runner's program was replaced by one of another version; restart the runner"), client.Stop(ctx))
	}
	l.mu.Lock()
	l.client, l.instance, l.foreign = client, hello.Instance, hello.Foreign()
	images := len(l.images)
	l.changed()
	l.mu.Unlock()
	l.cfg.Log.InfoContext(ctx, "pager is there", "pid", hello.PID, "new", fresh, "images", images)
	if hello.Foreign() {
		l.cfg.Log.WarnContext(ctx,
			"the pager has another version: machines that have memory from it continue, and checkpoints are fetched whole until these machines have ended", "pid", hello.PID)
	}
	return nil
}

// process is a pager that runs.
type process struct {
	client   *pager.Client
	instance string
	foreign  bool // see Images
}

// running returns the pager that runs as far as is known; its client is nil if none runs.
func (l *Images) running() process {
	l.mu.Lock()
	defer l.mu.Unlock()
	return process{l.client, l.instance, l.foreign}
}

// The pauses before a pager is started or watched again.
const (
	firstPause = time.Second
	lastPause  = time.Minute
)

// Run watches the pager until ctx ends. When the pager ends, Run ends the machines that had memory from it, and starts another for
// images that are not complete.
func (l *Images) Run(ctx context.Context) {
	sidecar.Supervisor[process]{
		Name: "pager", Lost: "checkpoints that are not complete cannot be forked", Log: l.cfg.Log,
		Find: l.find, Start: l.start, Attend: l.attend, Ended: l.ended,
		Starts: sidecar.Backoff{First: firstPause, Last: lastPause}, Attends: sidecar.Backoff{First: firstPause, Last: lastPause},
	}.Run(ctx)
}

// find says whether a pager runs, and whether one is needed.
func (l *Images) find() (process, sidecar.State, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := process{l.client, l.instance, l.foreign}
	switch {
	case p.client != nil:
		return p, sidecar.Running, l.news
	case len(l.images) > 0:
		return p, sidecar.Needed, l.news
	}
	return p, sidecar.Unneeded, l.news
}

// ended does what follows when a pager is no longer watched.
func (l *Images) ended(ctx context.Context, p process, cause error, hung bool) (alive bool) {
	if errors.Is(cause, errIdle) {
		l.retire(ctx, p.client)
		return false
	}
	if p.client.Alive(ctx, p.instance) { // its machines continue, whatever was wrong with a message or a connection
		l.unheard.Add(1)
		return true
	}
	if hung {
		l.hung.Add(1)
	}
	l.died(ctx, cause)
	return false
}

// attend offers all images to a pager and reads its reports, until the pager or ctx ends.
func (l *Images) attend(ctx context.Context, p process) error {
	l.mu.Lock()
	images := slices.Collect(maps.Values(l.images))
	l.mu.Unlock()
	offering, stop := context.WithCancel(ctx)
	var offers sync.WaitGroup
	defer offers.Wait()
	defer stop()
	for _, im := range images {
		offers.Go(func() { l.offer(offering, p, im) })
	}
	watching, idle := context.WithCancelCause(ctx)
	defer idle(nil)
	return p.client.Attend(watching, func(list []pager.Status) {
		l.applyStatus(ctx, p.client, list)
		if p.foreign && len(list) == 0 {
			idle(errIdle)
		}
	})
}

// errIdle says that a pager of another version no longer serves anything.
var errIdle = errors.New("the pager serves nothing")

// errForeign says that no pager accepts an image, because the running one has another version.
var errForeign = core.Errorf(core.Unavailable, core.CodePagerGone,
	"the pager of this runner has another version of Coppice and accepts no new images; another pager is started when no VM has memory from it")

// retire ends a pager of another version that serves nothing. Such a pager accepts no new images, so nothing will need it.
func (l *Images) retire(ctx context.Context, client *pager.Client) {
	if err := client.Stop(ctx); err != nil && !errors.Is(err, pager.ErrGone) {
		l.cfg.Log.WarnContext(ctx, "the pager of another version was not ended", "err", err)
		_ = pace.Pause(ctx, time.Second)
		return
	}
	l.mu.Lock()
	l.client, l.instance, l.foreign = nil, "", false
	l.changed()
	l.mu.Unlock()
	l.cfg.Log.InfoContext(ctx, "the pager of another version serves nothing and was ended")
}

// offer asks a pager to serve an image, unless it does already. It tries until the pager accepts the image, nobody expects the image
// any more, or ctx ends.
func (l *Images) offer(ctx context.Context, p process, im *Image) {
	sidecar.Offer(ctx, sidecar.Backoff{First: firstPause, Last: lastPause}, l.keysArrived, func(ctx context.Context) error {
		there, err := l.serve(ctx, p.client, p.instance, im)
		if ctx.Err() != nil || !there {
			return nil
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		im.refused = err
		l.changed()
		return err
	}, func(pause time.Duration, err error) {
		l.cfg.Log.WarnContext(ctx, "the pager has not accepted an image; it is offered again",
			"image", im.ID, "again_ms", core.Milliseconds(pause), "err", err)
	})
}

// keysArrived returns a channel that is closed when keys of the store arrive.
func (l *Images) keysArrived() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.keyed
}

// Wake offers the images that no pager has accepted again, at once: missing keys may have arrived.
func (l *Images) Wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.keyed)
	l.keyed = make(chan struct{})
}

// serve asks a pager to serve an image, unless it does already. there is false if nobody expects the image any more.
func (l *Images) serve(ctx context.Context, client *pager.Client, instance string, im *Image) (there bool, err error) {
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
	if l.running().foreign {
		return true, errForeign
	}
	if err := l.put(ctx, client, instance, im); err != nil || known() {
		return true, err
	}
	return false, errors.Join(client.Drop(ctx, im.ID), l.erase(im.ID)) // it was dropped meanwhile
}

// put gives an image to a pager, with its part. The caller holds im.serving.
func (l *Images) put(ctx context.Context, client *pager.Client, instance string, im *Image) (err error) {
	var part *os.File
	if im.Made == instance {
		part, err = os.OpenFile(filepath.Join(l.dir, im.ID+partSuffix), os.O_RDWR, 0)
	} else {
		part, err = l.makePart(im)
	}
	if err != nil {
		return err
	}
	defer part.Close()
	if im.Made != instance {
		im.Made = instance
		if err := atomicfile.WriteJSON(filepath.Join(l.dir, im.ID+recordSuffix), im, 0o600); err != nil {
			im.Made = ""
			return err
		}
	}
	if err := client.Keys(ctx, l.cfg.Keys.Keys()); err != nil {
		return err
	}
	_, err = client.Put(ctx, im.Image, part)
	return err
}

// makePart makes a new file for an image, with the seed's bytes if there is a seed.
func (l *Images) makePart(im *Image) (_ *os.File, err error) {
	path := filepath.Join(l.dir, im.ID+partSuffix)
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
		seed, err := l.cfg.Host.OpenBase(im.SeedBase)
		if err == nil {
			_, err = sparse.Clone(f, seed)
			err = errors.Join(err, seed.Close())
		} else if core.CodeOf(err) == core.CodeCheckpointCorrupt { // the seed was removed, so all bytes come from the store
			im.Seed, im.SeedBase, err = nil, "", nil
		}
		if err != nil {
			return f, err
		}
	}
	return f, f.Truncate(im.Size)
}

// applyStatus applies a status that the pager reported.
func (l *Images) applyStatus(ctx context.Context, client *pager.Client, list []pager.Status) {
	var done, damaged []*Image
	var strange []pager.Status
	l.mu.Lock()
	for _, st := range list {
		im := l.images[st.ID]
		if im == nil {
			if !l.recorded[st.ID] {
				strange = append(strange, st)
			}
			continue
		}
		if st.Damaged() && !im.status.Damaged() {
			damaged = append(damaged, im)
		}
		if st.Problem != nil && im.status.Problem == nil && !st.Damaged() {
			l.cfg.Log.WarnContext(ctx, "machines that touch missing memory of an image wait",
				"image", st.ID, "problem", st.Problem.Message)
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
		l.cfg.Host.EndMachines(ctx, im.status.Problem.Message, func(m Machine) bool { return m.uses(im.ID) })
	}
	for _, im := range done {
		if err := l.publish(ctx, client, im); err != nil {
			l.cfg.Log.ErrorContext(ctx, "a complete image was not moved to its place", "image", im.ID, "err", err)
		}
	}
	for _, st := range strange {
		if err := l.letGo(ctx, client, st); err != nil && !errors.Is(err, pager.ErrGone) {
			l.cfg.Log.WarnContext(ctx, "the pager serves an image that nothing needs", "image", st.ID, "err", err)
		}
	}
}

// letGo tells the pager what to do with an image that is not expected: it is in its place by now, or nothing needs it. Machines keep the
// files that they have open.
func (l *Images) letGo(ctx context.Context, client *pager.Client, st pager.Status) error {
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

// publish moves the part of a complete image to its place. It checks that this part is the file that the pager has written.
func (l *Images) publish(ctx context.Context, client *pager.Client, im *Image) error {
	part := filepath.Join(l.dir, im.ID+partSuffix)
	var is unix.Stat_t
	if err := unix.Stat(part, &is); err != nil {
		return fmt.Errorf("examine the part of image %s: %w", im.ID, err)
	}
	if is.Ino != im.status.Part {
		return core.Errorf(core.Internal, core.CodeInternal,
			"the pager has written to another file (inode %d) than the part of image %s (inode %d)", im.status.Part, im.ID, is.Ino)
	}
	if err := os.Chmod(part, 0o444); err != nil { //nolint:gosec // G302: VMMs, other users, read it
		return err
	}
	if err := atomicfile.Rename(part, filepath.Join(l.cfg.DataDir, im.To)); err != nil {
		return err
	}
	l.forget(im)
	return errors.Join(l.erase(im.ID), client.Taken(ctx, im.ID))
}

// died forgets a pager that has ended, and ends the machines that had memory from it.
func (l *Images) died(ctx context.Context, cause error) {
	l.mu.Lock()
	instance := l.instance
	l.client, l.instance = nil, ""
	for _, im := range l.images {
		im.status = pager.Status{}
	}
	l.changed()
	l.mu.Unlock()
	l.cfg.Log.ErrorContext(ctx, "the pager has ended", "err", cause)
	l.cfg.Host.PagerEnded(ctx, instance)
	l.cfg.Host.EndMachines(ctx, "the pager of its runner ended, and the pager served some of its memory", func(m Machine) bool { return m.Pager == instance })
}

// Stop ends the pager. No machine may have memory from it.
func (l *Images) Stop(ctx context.Context) error {
	l.mu.Lock()
	client := l.client
	l.client, l.instance = nil, ""
	l.mu.Unlock()
	if l.cfg.Pager == nil {
		return nil
	}
	if client != nil {
		if err := client.Stop(ctx); err != nil && !errors.Is(err, pager.ErrGone) {
			return fmt.Errorf("stop the pager: %w", err)
		}
	}
	return pager.Clean(l.cfg.Pager.Dir)
}
