package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/pager"
)

// lazyImages are the memory bases and root file systems of this host that machines use while they are being fetched. A pager serves them; each
// becomes a file like any other once it is whole. What a pager of another process needs to go on is on disk: a record and a part for each.
type lazyImages struct {
	r   *Runner
	dir string

	mu       sync.Mutex // guards what follows
	client   *pager.Client
	instance string // of the pager; empty: none runs
	images   map[string]*lazyImage
	news     chan struct{} // closed when something has changed
}

// lazyImage is one image that is not whole. It is kept as JSON.
type lazyImage struct {
	pager.Image
	Size     int64             `json:"size"`                // bytes of the image
	To       string            `json:"to"`                  // where its file goes, below the data directory
	SeedBase core.BaseID       `json:"seed_base,omitempty"` // the base that its part begins with
	Compared core.CheckpointID `json:"compared,omitempty"`  // the checkpoint of the seed, whose maps are read too; it never changes

	status pager.Status
}

const (
	lazyRecord = ".json"
	lazyPart   = ".part"
)

// openLazyImages reads what an earlier process left: images that are whole by now are forgotten.
func openLazyImages(r *Runner) (*lazyImages, error) {
	l := &lazyImages{r: r, dir: filepath.Join(r.cfg.DataDir, "lazy"), images: make(map[string]*lazyImage), news: make(chan struct{})}
	if err := os.MkdirAll(l.dir, 0o700); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(l.dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		id, ok := strings.CutSuffix(e.Name(), lazyRecord)
		if !ok {
			continue
		}
		b, err := os.ReadFile(filepath.Join(l.dir, e.Name()))
		if err != nil {
			return nil, err
		}
		im := new(lazyImage)
		if err := json.Unmarshal(b, im); err != nil || im.ID != id {
			return nil, core.Wrapf(err, core.DataLoss, core.CodeCheckpointCorrupt, "the record of the image %s that is being fetched is damaged", core.Clip(id))
		}
		if _, err := os.Stat(filepath.Join(r.cfg.DataDir, im.To)); err == nil {
			if err := l.erase(id); err != nil {
				return nil, err
			}
			continue
		}
		l.images[id] = im
	}
	for _, e := range entries { // parts of which nothing is known
		if id, ok := strings.CutSuffix(e.Name(), lazyPart); ok && l.images[id] == nil {
			if err := ignoreAbsent(os.Remove(filepath.Join(l.dir, e.Name()))); err != nil {
				return nil, err
			}
		}
	}
	return l, nil
}

func (l *lazyImages) erase(id string) error {
	path := filepath.Join(l.dir, id)
	return errors.Join(ignoreAbsent(os.Remove(path+lazyPart)), ignoreAbsent(os.Remove(path+lazyRecord)))
}

// changed tells who waits. The caller holds mu.
func (l *lazyImages) changed() {
	close(l.news)
	l.news = make(chan struct{})
}

// start makes sure that a pager runs and serves what is not whole. fresh says that it is not the one that machines of an earlier process have
// their memory from.
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
	l.mu.Lock()
	l.client, l.instance = client, hello.Instance
	images := slices.Collect(maps.Values(l.images))
	l.changed()
	l.mu.Unlock()
	l.r.cfg.Log.InfoContext(ctx, "pager is there", "pid", hello.PID, "new", fresh, "images", len(images))
	for _, im := range images {
		if err := l.serve(ctx, client, im); err != nil {
			l.r.cfg.Log.WarnContext(ctx, "an image is not served", "image", im.ID, "err", err)
		}
	}
	return nil
}

// serve has a pager serve an image, unless it does.
func (l *lazyImages) serve(ctx context.Context, client *pager.Client, im *lazyImage) error {
	if f, err := client.Open(ctx, im.ID); err == nil {
		return f.Close()
	}
	part, err := l.makePart(im)
	if err != nil {
		return err
	}
	_, err = client.Put(ctx, im.Image, part)
	return errors.Join(err, part.Close())
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

// begin has an image served from now on, which it records first. One that is served is left as it is.
func (l *lazyImages) begin(ctx context.Context, im *lazyImage) (err error) {
	l.mu.Lock()
	if l.images[im.ID] != nil {
		l.mu.Unlock()
		return nil
	}
	client := l.client
	l.images[im.ID] = im
	l.mu.Unlock()
	defer func() {
		if err != nil {
			l.mu.Lock()
			delete(l.images, im.ID)
			l.changed()
			l.mu.Unlock()
			err = errors.Join(err, l.erase(im.ID))
		}
	}()
	part, err := l.makePart(im)
	if err != nil {
		return err
	}
	defer part.Close()
	if err := atomicfile.WriteJSON(filepath.Join(l.dir, im.ID+lazyRecord), im, 0o600); err != nil {
		return err
	}
	if client == nil {
		return pager.ErrGone
	}
	_, err = client.Put(ctx, im.Image, part)
	return err
}

// ready starts a pager if none runs, and reports whether images can be served.
func (l *lazyImages) ready(ctx context.Context) bool {
	if l.r.cfg.Store.Pager == nil || l.r.cfg.Store.Whole {
		return false
	}
	l.mu.Lock()
	running := l.client != nil
	l.mu.Unlock()
	if running {
		return true
	}
	if err := l.start(ctx); err != nil {
		l.r.cfg.Log.WarnContext(ctx, "there is no pager: checkpoints are fetched whole before they are forked", "err", err)
		return false
	}
	return true
}

// has reports whether an image is not whole.
func (l *lazyImages) has(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.images[id] != nil
}

// open opens what the pager shows of an image that is not whole; fs.ErrNotExist for another.
func (l *lazyImages) open(id string) (*os.File, error) {
	ctx, cancel := context.WithTimeout(l.r.runCtx, time.Minute)
	defer cancel()
	for {
		l.mu.Lock()
		there, client, news := l.images[id] != nil, l.client, l.news
		l.mu.Unlock()
		if !there {
			return nil, fs.ErrNotExist
		}
		if client == nil {
			return nil, pager.ErrGone
		}
		f, err := client.Open(ctx, id)
		if core.CategoryOf(err) != core.NotFound {
			return f, err
		}
		select { // it is whole, and nobody had it open: its file is about to be there
		case <-news:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// whole waits until images are whole, or will never be.
func (l *lazyImages) whole(ctx context.Context, ids ...string) error {
	for _, id := range ids {
		for {
			l.mu.Lock()
			im, news := l.images[id], l.news
			var err error
			if im != nil && im.status.Damaged() {
				err = im.status.Problem.Err()
			}
			l.mu.Unlock()
			if im == nil || err != nil {
				if err != nil {
					return err
				}
				break
			}
			select {
			case <-news:
			case <-ctx.Done():
				return fmt.Errorf("wait for image %s to be fetched: %w", id, context.Cause(ctx))
			}
		}
	}
	return nil
}

// wholeImages waits until what a checkpoint needs is all on this host.
func (r *Runner) wholeImages(ctx context.Context, rec *checkpointRecord) error {
	return r.lazy.whole(ctx, string(rec.Base), rootImageID(rec.Image))
}

// drop gives an image up that nothing needs.
func (l *lazyImages) drop(id string) error {
	l.mu.Lock()
	there, client := l.images[id] != nil, l.client
	delete(l.images, id)
	l.changed()
	l.mu.Unlock()
	if !there {
		return nil
	}
	var err error
	if client != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err = client.Drop(ctx, id); errors.Is(err, pager.ErrGone) {
			err = nil
		}
	}
	return errors.Join(err, l.erase(id))
}

// findPager looks for the pager of an earlier process, if anything needs one: machines that it left, or images that are not whole.
func (r *Runner) findPager(ctx context.Context, left []leftover) {
	needed := len(r.lazy.images) > 0
	for _, l := range left {
		needed = needed || l.journal != nil && l.journal.Pager != ""
	}
	if !needed {
		return
	}
	if err := r.lazy.start(ctx); err != nil {
		r.cfg.Log.ErrorContext(ctx, "there is no pager to go on with images that are being fetched", "err", err)
	}
}

// run watches the pager until ctx ends. When it has ended, so do the machines that had memory from it, and another is started for what is not
// whole.
func (l *lazyImages) run(ctx context.Context) {
	const firstWait, lastWait = time.Second, time.Minute
	wait := firstWait
	for ctx.Err() == nil {
		l.mu.Lock()
		client, news, images := l.client, l.news, len(l.images)
		l.mu.Unlock()
		switch {
		case client != nil:
			wait = firstWait
			if err := client.Watch(ctx, func(list []pager.Status) { l.heard(ctx, list) }); ctx.Err() == nil {
				l.died(ctx, err)
			}
			continue
		case images > 0:
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

// heard takes what the pager says.
func (l *lazyImages) heard(ctx context.Context, list []pager.Status) {
	var done, damaged []*lazyImage
	l.mu.Lock()
	for _, st := range list {
		im := l.images[st.ID]
		if im == nil {
			continue
		}
		if st.Damaged() && !im.status.Damaged() {
			damaged = append(damaged, im)
		}
		if st.Problem != nil && im.status.Problem == nil && !st.Damaged() {
			l.r.cfg.Log.WarnContext(ctx, "machines wait for the store where they touch memory that is not here yet", "image", st.ID, "problem", st.Problem.Message)
		}
		im.status = st
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
		if err := l.publish(im); err != nil {
			l.r.cfg.Log.ErrorContext(ctx, "an image that is whole was not taken", "image", im.ID, "err", err)
		}
	}
}

// publish makes the part of a whole image the file that it was for.
func (l *lazyImages) publish(im *lazyImage) error {
	part := filepath.Join(l.dir, im.ID+lazyPart)
	if err := os.Chmod(part, 0o444); err != nil { //nolint:gosec // G302: VMMs, other users, read it
		return err
	}
	if err := atomicfile.Rename(part, filepath.Join(l.r.cfg.DataDir, im.To)); err != nil {
		return err
	}
	l.mu.Lock()
	if l.images[im.ID] == im {
		delete(l.images, im.ID)
	}
	l.changed()
	l.mu.Unlock()
	return l.erase(im.ID)
}

// died is called when the pager has ended.
func (l *lazyImages) died(ctx context.Context, cause error) {
	l.mu.Lock()
	instance := l.instance
	l.client, l.instance = nil, ""
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

// blame explains the failure of a machine by what its memory comes from, if that is it.
func (l *lazyImages) blame(s *shell, err error) error {
	if s == nil || s.Pager == "" {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.instance != s.Pager {
		return errors.Join(pager.ErrGone, err)
	}
	for id, im := range l.images {
		if s.uses(id) && im.status.Problem != nil {
			return errors.Join(im.status.Problem.Err(), err)
		}
	}
	return err
}

// instanceFor names the pager that a machine with a base and a root file system has some of it from; empty: none.
func (l *lazyImages) instanceFor(fromPager bool, root core.Digest) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if fromPager || l.images[rootImageID(root)] != nil {
		return l.instance
	}
	return ""
}

// roots are the digests, in hex, of the root file systems that are not whole.
func (l *lazyImages) roots() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for id := range l.images {
		if hex, ok := strings.CutPrefix(id, "root-"); ok {
			out = append(out, hex)
		}
	}
	return out
}

func rootImageID(d core.Digest) string { return "root-" + d.Hex() }

// uses reports whether a machine may have an image from the pager.
func (s *shell) uses(id string) bool {
	return s.Pager != "" && (id == string(s.shape.base) || id == rootImageID(s.shape.image))
}

// endUsers ends machines, for a reason that is told.
func (r *Runner) endUsers(ctx context.Context, why string, of func(*shell) bool) {
	for _, s := range r.all() {
		if !of(s.shell) {
			continue
		}
		r.cfg.Log.ErrorContext(ctx, "sandbox is ended", "sandbox_id", s.info.ID, "reason", why)
		if err := s.end(ctx, why); err != nil {
			r.cfg.Log.ErrorContext(ctx, "sandbox was not ended", "sandbox_id", s.info.ID, "err", err)
		}
	}
}

// arriving is the bases among them, as the store of bases wants to know them.
type arriving struct{ *lazyImages }

// Open implements memory.Arriving.
func (a arriving) Open(id core.BaseID) (*os.File, error) { return a.open(string(id)) }

// List implements memory.Arriving.
func (a arriving) List() []core.BaseID {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []core.BaseID
	for id := range a.images {
		if base, err := core.ParseID[core.BaseID](id); err == nil {
			out = append(out, base)
		}
	}
	return out
}

// Remove implements memory.Arriving.
func (a arriving) Remove(id core.BaseID) error { return a.drop(string(id)) }
