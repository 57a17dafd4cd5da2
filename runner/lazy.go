package runner

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/runner/room"
)

// lazyImages are the memory bases and root file systems of this host that machines use while they are being fetched. A pager serves them; each
// becomes a file like any other once it is whole. What a pager of another process needs to go on is on disk: a record and a part for each.
type lazyImages struct {
	r       *Runner
	dir     string
	unheard atomic.Int64 // times that a pager which runs was not heard
	hung    atomic.Int64 // pagers that were killed because they did not answer
	arrived func()       // an image is whole, or was given up; nil: nobody wants to know

	mu       sync.Mutex // guards what follows
	client   *pager.Client
	instance string // of the pager; empty: none runs
	foreign  bool   // it is of another version: what it serves goes on, and nothing else is served until it has nothing left
	images   map[string]*lazyImage
	// rehearsed are images of rehearsals, which are served and not awaited.
	rehearsed map[string]bool
	news      chan struct{} // closed when something has changed
	keyed     chan struct{} // closed when keys of the store have come
}

// lazyImage is one image that is not whole. It is kept as JSON.
type lazyImage struct {
	pager.Image
	Size     int64             `json:"size"`                // bytes of the image
	To       string            `json:"to"`                  // where its file goes, below the data directory
	SeedBase core.BaseID       `json:"seed_base,omitempty"` // the base that its part begins with
	Compared core.CheckpointID `json:"compared,omitempty"`  // the checkpoint of the seed, whose maps are read too; it never changes
	// Made is the instance of the pager that its part was made for. That one may write it, even if it has not said yet that it serves the
	// image: a part is made anew for another only.
	Made string `json:"made,omitempty"`

	Reserved int64 `json:"reserved,omitempty"` // bytes of disk that were reserved for its part when it was begun

	room    *room.Reservation
	serving sync.Mutex // held while it is offered; guards Made, Seed, SeedBase and the part
	// What follows is guarded by the mu of lazyImages.
	status  pager.Status
	refused error // why no pager has taken it
}

// reserve takes its share of what was reserved for a fetch.
func (im *lazyImage) reserve(from *room.Reservation, n int64) {
	im.Reserved, im.room = n, from.Split(n)
}

const (
	lazyRecord = ".json"
	lazyPart   = ".part"
)

// openLazyImages reads what an earlier process left: images that are whole by now are forgotten.
func openLazyImages(r *Runner) (*lazyImages, error) {
	l := &lazyImages{r: r, dir: filepath.Join(r.cfg.DataDir, "lazy"), images: make(map[string]*lazyImage), rehearsed: make(map[string]bool), news: make(chan struct{}), keyed: make(chan struct{})}
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
		im.room = r.room.Hold(im.Reserved)
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

// begin has an image served from now on, which it records first. One that is served is left as it is.
func (l *lazyImages) begin(ctx context.Context, im *lazyImage) (err error) {
	im.serving.Lock()
	defer im.serving.Unlock()
	l.mu.Lock()
	if l.images[im.ID] != nil {
		l.mu.Unlock()
		im.room.Release() // the one that is served has its own
		return nil
	}
	client, instance := l.client, l.instance
	l.images[im.ID] = im
	l.mu.Unlock()
	defer func() {
		if err != nil {
			l.forget(im)
			err = errors.Join(err, l.erase(im.ID))
		}
	}()
	if client == nil {
		return pager.ErrGone
	}
	return l.put(ctx, client, instance, im)
}

// forget has an image no longer known.
func (l *lazyImages) forget(im *lazyImage) {
	l.mu.Lock()
	if l.images[im.ID] == im {
		delete(l.images, im.ID)
	}
	l.changed()
	l.mu.Unlock()
	im.room.Release() // by now nobody counts it any more
	if l.arrived != nil {
		l.arrived()
	}
}

// ready starts a pager if none runs, and reports whether images can be served.
func (l *lazyImages) ready(ctx context.Context) bool {
	if l.r.cfg.Store.Pager == nil || l.r.cfg.Store.Whole {
		return false
	}
	l.mu.Lock()
	running, foreign := l.client != nil, l.foreign
	l.mu.Unlock()
	if running {
		return !foreign
	}
	if err := l.start(ctx); err != nil {
		l.r.cfg.Log.WarnContext(ctx, "there is no pager: checkpoints are fetched whole before they are forked", "err", err)
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.client != nil && !l.foreign
}

// has reports whether an image is not whole.
func (l *lazyImages) has(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.images[id] != nil
}

// open opens what the pager shows of an image that is not whole; fs.ErrNotExist for another. It waits a minute for one that no pager has
// taken yet.
func (l *lazyImages) open(id string) (*os.File, error) {
	ctx, cancel := context.WithTimeout(l.r.runCtx, openTime)
	defer cancel()
	for {
		l.mu.Lock()
		im, client, news := l.images[id], l.client, l.news
		var refused error
		if im != nil {
			refused = im.refused
		}
		l.mu.Unlock()
		if im == nil {
			return nil, fs.ErrNotExist
		}
		if client != nil {
			f, err := client.Open(ctx, id)
			if core.CategoryOf(err) != core.NotFound && !errors.Is(err, pager.ErrGone) {
				return f, err
			}
		} else if refused == nil {
			refused = pager.ErrGone
		}
		select { // it is offered to the pager, or to the next one; or its file is about to be there
		case <-news:
		case <-ctx.Done():
			return nil, cmp.Or(refused, context.Cause(ctx))
		}
	}
}

// openTime is how long open waits for a pager to take an image.
const openTime = time.Minute

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
	return r.lazy.whole(ctx, string(rec.Base), rootImageID(rec.rootKey()))
}

// drop gives an image up that nothing needs.
func (l *lazyImages) drop(id string) error {
	l.mu.Lock()
	im, client := l.images[id], l.client
	delete(l.images, id)
	l.changed()
	l.mu.Unlock()
	if im == nil {
		return nil
	}
	defer im.room.Release()
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
		if w := im.status.Waiters; s.uses(id) && len(w) > 0 {
			return errors.Join(stallProblem(s.ID, w[0].Since, w[0].Object, nil).Err(), err)
		}
	}
	return err
}

// damageTime bounds the question which image is damaged.
const damageTime = 5 * time.Second

// damage asks the pager which image of a machine is damaged, and returns the reason. A machine that touches such memory may end
// before the pager's next status arrives. Empty: no image is damaged, or the pager does not say.
func (l *lazyImages) damage(ctx context.Context, s *shell) string {
	l.mu.Lock()
	client, same := l.client, l.instance == s.Pager
	l.mu.Unlock()
	if client == nil || !same {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, damageTime)
	defer cancel()
	images, _, err := client.List(ctx)
	if err != nil {
		return ""
	}
	for _, st := range images {
		if s.uses(st.ID) && st.Damaged() {
			return st.Problem.Message
		}
	}
	return ""
}

// instanceFor names the pager that a machine with a base and a root file system has some of it from; empty: none.
func (l *lazyImages) instanceFor(fromPager bool, root rootKey) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if fromPager || l.images[rootImageID(root)] != nil {
		return l.instance
	}
	return ""
}

// roots are the root file systems that are not whole.
func (l *lazyImages) roots() []rootKey {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []rootKey
	for id := range l.images {
		if key, ok := strings.CutPrefix(id, "root-"); ok {
			out = append(out, rootKey(key))
		}
	}
	return out
}

func rootImageID(k rootKey) string { return "root-" + string(k) }

// uses reports whether a machine may have an image from the pager.
func (s *shell) uses(id string) bool {
	return s.Pager != "" && (id == string(s.shape.base) || id == rootImageID(s.shape.rootKey()))
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
