package lazy

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/runner/room"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
)

// Config configures Images. Fields without a note are required.
type Config struct {
	DataDir string         // of the runner: records and parts of images are in its directory "lazy"
	Pager   *pager.Process // nil: there is no pager, and nothing is lazy
	Whole   bool           // new images are fetched whole; a pager serves only the images that it serves already
	Room    *room.Room     // the space for parts
	Keys    *envelope.Ring // of objects in the store; the pager gets them with each image
	Log     *slog.Logger
	Host    Host
}

// Host has the methods of the runner that Images need. Images hold no lock when they call them.
type Host interface {
	// OpenBase opens the file of a base that is complete on this host, as memory.BaseStore does.
	OpenBase(id core.BaseID) (*os.File, error)
	// ImageArrived is called when an image is complete, or is no longer expected.
	ImageArrived()
	// EndMachines ends the machines that match, and keeps the reason.
	EndMachines(ctx context.Context, why string, match func(Machine) bool)
	// PagerEnded releases everything except running machines that has memory from this instance of the pager. Images call
	// EndMachines next.
	PagerEnded(ctx context.Context, instance string)
}

// Machine says which images a machine uses.
type Machine struct {
	ID    core.SandboxID
	Pager string // the instance of the pager that serves some of them; empty: none
	Base  core.BaseID
	Root  string // key of its root file system
}

func (m Machine) uses(id string) bool {
	return m.Pager != "" && (id == string(m.Base) || id == RootID(m.Root))
}

// RootID is the id of the image of a root file system. The image of a base has the id of the base.
func RootID(key string) string { return rootPrefix + key }

// RootKey is the opposite of RootID. ok is false for the id of a base.
func RootKey(id string) (key string, ok bool) { return strings.CutPrefix(id, rootPrefix) }

const rootPrefix = "root-"

// Images are the memory bases and root file systems of this host that machines use before they are complete. A complete image becomes a
// file like any other. A record and a part of each image are on disk, so another runner or another pager can continue. The methods are
// safe for concurrent use.
type Images struct {
	WorkingSets WorkingSets // by base

	cfg     Config
	life    context.Context // of the runner
	dir     string
	unheard atomic.Int64 // times that a report of a running pager was not received
	hung    atomic.Int64 // pagers that were killed because they did not answer

	mu       sync.Mutex // guards what follows
	client   *pager.Client
	instance string // of the pager; empty: none runs
	foreign  bool   // the pager has another version: it keeps its images and gets no new ones
	images   map[string]*Image
	// recorded are images of recordings. The pager serves them, and nothing waits for them to become complete.
	recorded map[string]bool
	news     chan struct{} // closed when something has changed
	keyed    chan struct{} // closed when keys of the store have arrived
}

// Image is one image that is not complete. It is kept as JSON.
type Image struct {
	pager.Image
	Size     int64             `json:"size"`                // bytes of the image
	To       string            `json:"to"`                  // the place of its file, below the data directory
	SeedBase core.BaseID       `json:"seed_base,omitempty"` // the base that its part begins with
	Compared core.CheckpointID `json:"compared,omitempty"`  // the checkpoint of the seed, whose maps are read too; it never changes
	// Made is the instance of the pager that the part was made for. That pager may write the part, even if it has not said yet that it
	// serves the image. A new part is made only for another pager.
	Made string `json:"made,omitempty"`

	Reserved int64 `json:"reserved,omitempty"` // bytes of disk that were reserved for its part when it began

	room    *room.Reservation
	serving sync.Mutex // held while the image is offered; guards Made, Seed, SeedBase and the part
	// The mu of Images guards the fields below.
	status  pager.Status
	refused error // why no pager has accepted it
}

// Reserve moves n bytes from the reservation of a fetch to the image.
func (im *Image) Reserve(from *room.Reservation, n int64) {
	im.Reserved, im.room = n, from.Split(n)
}

const (
	recordSuffix = ".json"
	partSuffix   = ".part"
)

// Open reads the records of an earlier runner. It forgets images that are complete by now. life ends with the runner.
func Open(life context.Context, cfg Config) (*Images, error) {
	l := &Images{
		cfg: cfg, life: life, dir: filepath.Join(cfg.DataDir, "lazy"),
		images: make(map[string]*Image), recorded: make(map[string]bool), news: make(chan struct{}), keyed: make(chan struct{}),
	}
	if err := os.MkdirAll(l.dir, 0o700); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(l.dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		id, ok := strings.CutSuffix(e.Name(), recordSuffix)
		if !ok {
			continue
		}
		b, err := os.ReadFile(filepath.Join(l.dir, e.Name()))
		if err != nil {
			return nil, err
		}
		im := new(Image)
		if err := json.Unmarshal(b, im); err != nil || im.ID != id {
			return nil, core.Wrapf(err, core.DataLoss, core.CodeCheckpointCorrupt,
				"the record of the image %s that is being fetched is damaged", core.Clip(id))
		}
		if _, err := os.Stat(filepath.Join(cfg.DataDir, im.To)); err == nil {
			if err := l.erase(id); err != nil {
				return nil, err
			}
			continue
		}
		im.room = cfg.Room.Hold(im.Reserved)
		l.images[id] = im
	}
	for _, e := range entries { // parts without a record
		if id, ok := strings.CutSuffix(e.Name(), partSuffix); ok && l.images[id] == nil {
			if err := ignoreAbsent(os.Remove(filepath.Join(l.dir, e.Name()))); err != nil {
				return nil, err
			}
		}
	}
	return l, nil
}

func (l *Images) erase(id string) error {
	path := filepath.Join(l.dir, id)
	return errors.Join(ignoreAbsent(os.Remove(path+partSuffix)), ignoreAbsent(os.Remove(path+recordSuffix)))
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// changed wakes those who wait for news. The caller holds mu.
func (l *Images) changed() {
	close(l.news)
	l.news = make(chan struct{})
}

// Begin records an image. From then on the pager serves it. Begin does nothing if the image is served already.
func (l *Images) Begin(ctx context.Context, im *Image) (err error) {
	im.serving.Lock()
	defer im.serving.Unlock()
	l.mu.Lock()
	if l.images[im.ID] != nil {
		l.mu.Unlock()
		im.room.Release() // the image that is served has its own reservation
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

// forget removes an image from the list.
func (l *Images) forget(im *Image) {
	l.mu.Lock()
	if l.images[im.ID] == im {
		delete(l.images, im.ID)
	}
	l.changed()
	l.mu.Unlock()
	im.room.Release() // nothing counts it any more
	l.cfg.Host.ImageArrived()
}

// Ready reports whether new images can be served. It starts a pager if none runs.
func (l *Images) Ready(ctx context.Context) bool {
	if l.cfg.Pager == nil || l.cfg.Whole {
		return false
	}
	l.mu.Lock()
	running, foreign := l.client != nil, l.foreign
	l.mu.Unlock()
	if running {
		return !foreign
	}
	if err := l.start(ctx); err != nil {
		l.cfg.Log.WarnContext(ctx, "there is no pager: checkpoints are fetched whole before they are forked", "err", err)
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.client != nil && !l.foreign
}

// Has reports whether an image is expected but not complete.
func (l *Images) Has(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.images[id] != nil
}

// OpenFile opens an image that the pager serves. It returns fs.ErrNotExist if the image is not expected. If no pager has accepted the
// image yet, it waits for up to a minute.
func (l *Images) OpenFile(id string) (*os.File, error) {
	ctx, cancel := context.WithTimeout(l.life, openTime)
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
		select { // it is being offered to this or the next pager, or it is complete and its file will soon be in its place
		case <-news:
		case <-ctx.Done():
			return nil, cmp.Or(refused, context.Cause(ctx))
		}
	}
}

// openTime is how long OpenFile waits for a pager to accept an image.
const openTime = time.Minute

// Wait waits until the images are complete. It returns an error for an image that is damaged in the store.
func (l *Images) Wait(ctx context.Context, ids ...string) error {
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

// Missing reports whether some of the images are not complete, and why one of them does not arrive. It reports no problem while all of
// them are arriving.
func (l *Images) Missing(ids ...string) (some bool, problem error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		im := l.images[id]
		switch {
		case im == nil:
			continue
		case problem != nil:
		case im.status.Problem != nil:
			problem = im.status.Problem.Err()
		default:
			problem = im.refused
		}
		some = true
	}
	return some, problem
}

// Drop gives up an image that nothing needs. It is no error if the image is not there.
func (l *Images) Drop(id string) error {
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

// Explain adds the cause to a machine's error if the cause is the pager or one of the machine's images.
func (l *Images) Explain(m Machine, err error) error {
	if m.Pager == "" {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.instance != m.Pager {
		return errors.Join(pager.ErrGone, err)
	}
	for id, im := range l.images {
		if m.uses(id) && im.status.Problem != nil {
			return errors.Join(im.status.Problem.Err(), err)
		}
		if w := im.status.Waiters; m.uses(id) && len(w) > 0 {
			return errors.Join(stallProblem(m.ID, w[0].Since, w[0].Object, nil).Err(), err)
		}
	}
	return err
}

// damageTime bounds how long Damage waits for the pager.
const damageTime = 5 * time.Second

// Damage asks the pager which image of a machine is damaged, and returns the reason. A machine that touches such memory may end
// before the pager's next status arrives. Empty: no image is damaged, or the pager does not say.
func (l *Images) Damage(ctx context.Context, m Machine) string {
	l.mu.Lock()
	client, same := l.client, l.instance == m.Pager
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
		if m.uses(st.ID) && st.Damaged() {
			return st.Problem.Message
		}
	}
	return ""
}

// Instance identifies the running pager; empty: none runs.
func (l *Images) Instance() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.instance
}

// InstanceFor identifies the pager that serves the memory or the root file system of a machine; empty: none. arriving says that the pager
// serves its base.
func (l *Images) InstanceFor(arriving bool, rootKey string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if arriving || l.images[RootID(rootKey)] != nil {
		return l.instance
	}
	return ""
}

// Roots returns the keys of the root file systems that are not complete.
func (l *Images) Roots() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for id := range l.images {
		if key, ok := RootKey(id); ok {
			out = append(out, key)
		}
	}
	return out
}

// Sources returns the checkpoints in the store from which the pager reads the images.
func (l *Images) Sources() []core.CheckpointID {
	l.mu.Lock()
	defer l.mu.Unlock()
	ids := make(map[core.CheckpointID]bool)
	for _, im := range l.images {
		ids[im.Source.CheckpointID] = true
		if im.Compared != "" {
			ids[im.Compared] = true
		}
	}
	return slices.Collect(maps.Keys(ids))
}

// Freeable is how many bytes of disk the images take that are not needed. needed gets the id of an image and the checkpoint from which
// the image is read.
func (l *Images) Freeable(needed func(id string, from core.CheckpointID) bool) (n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, im := range l.images {
		if !needed(id, im.Source.CheckpointID) {
			n += im.Reserved + allocated(filepath.Join(l.dir, id+partSuffix))
		}
	}
	return n
}

// allocated is how many bytes a file takes on disk; 0 if there is no file.
func allocated(path string) int64 {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return 0
	}
	return st.Blocks * 512
}

// Bases gives the store of bases access to the images that are memory bases.
func (l *Images) Bases() memory.Arriving { return bases{l} }

type bases struct{ images *Images }

// Open implements memory.Arriving.
func (b bases) Open(id core.BaseID) (*os.File, error) { return b.images.OpenFile(string(id)) }

// List implements memory.Arriving.
func (b bases) List() []core.BaseID {
	b.images.mu.Lock()
	defer b.images.mu.Unlock()
	var out []core.BaseID
	for id := range b.images.images {
		if base, err := core.ParseID[core.BaseID](id); err == nil {
			out = append(out, base)
		}
	}
	return out
}

// Remove implements memory.Arriving.
func (b bases) Remove(id core.BaseID) error { return b.images.Drop(string(id)) }
