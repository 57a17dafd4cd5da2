//go:build linux

package watch

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// The bounds of watches.
const (
	maxWatches    = 32
	maxDirs       = 8192    // of one watch
	maxText       = 8 << 20 // bytes of the paths of directories, of all watches together (and of one path for each that is added now)
	maxEvents     = 4096    // that a watch keeps
	maxEventBytes = 1 << 20
	evictAfter    = 10 * time.Minute // without a reader a watch may be removed when another one needs its place
)

// Do runs fn in the workload's mount namespace, with the rights of the user that asked for a watch.
type Do func(ctx context.Context, fn func() error) error

// Watches are the watches of a guest.
type Watches struct {
	mu   sync.Mutex // guards list
	list []*Watch   // oldest first

	text atomic.Int64 // bytes of the paths of all watched directories
}

// Watch is one watch.
type Watch struct {
	do   Do
	file *os.File // of inotify
	root string
	dev  uint64

	text *atomic.Int64 // of all watches

	dirs map[int]string // paths by watch descriptor; used by run alone, once that runs
	done chan struct{}  // closed when run has ended

	mu     sync.Mutex // guards the fields below
	info   guestapi.Watch
	events []guestapi.WatchEvent // the last ones, in order
	bytes  int                   // of their paths
	wake   chan struct{}         // closed at the next event, when somebody waits
	read   time.Time             // when it was read last
	given  int64                 // the last event that a reader got
	active int                   // readers now
}

// Create watches a directory, and with recursive all below it on the same file system.
func (s *Watches) Create(ctx context.Context, do Do, req guestapi.CreateWatch) (guestapi.Watch, error) {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		return guestapi.Watch{}, core.Wrapf(err, core.Exhausted, guestapi.CodeWatchLimit, "the kernel of the sandbox has no room for another watch: %v", err)
	}
	w := &Watch{do: do, text: &s.text, file: os.NewFile(uintptr(fd), "inotify"), root: req.Path, dirs: map[int]string{}, done: make(chan struct{}), read: time.Now()}
	w.info = guestapi.Watch{ID: core.NewID[core.WatchID](), Path: req.Path, Recursive: req.Recursive, User: req.User, CreatedAt: time.Now().UTC()}
	w.use(1) // so that nobody takes its place meanwhile
	defer w.use(-1)
	if err := s.admit(w); err != nil { // before the walk: the guest decides how much memory the walk takes
		return guestapi.Watch{}, errors.Join(err, w.file.Close())
	}
	// Changes while the tree is read are events too; run handles them afterwards.
	err = do(ctx, func() error {
		var st unix.Stat_t
		if err := unix.Stat(req.Path, &st); err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return core.Errorf(core.Conflict, guestapi.CodeFileConflict, "watch %s: it is not a directory", core.Clip(req.Path))
		}
		w.dev = st.Dev
		return w.add(req.Path, 0, nil)
	})
	if err != nil {
		s.mu.Lock()
		s.list = slices.DeleteFunc(s.list, func(o *Watch) bool { return o == w })
		s.mu.Unlock()
		w.end()
		close(w.done)
		return guestapi.Watch{}, err
	}
	go w.run()
	return w.snapshot(), nil
}

// admit puts a watch on the list. If that is full, a watch that nobody has read for long makes room.
func (s *Watches) admit(w *Watch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.list) >= maxWatches {
		i := slices.IndexFunc(s.list, (*Watch).forgotten)
		if i < 0 {
			return core.Errorf(core.Exhausted, guestapi.CodeWatchLimit, "the sandbox has %d watches, which is the limit; delete one", len(s.list))
		}
		_ = s.list[i].file.Close()
		s.list = slices.Delete(s.list, i, i+1)
	}
	s.list = append(s.list, w)
	return nil
}

func (w *Watch) forgotten() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.active == 0 && time.Since(w.read) > evictAfter
}

// List returns all watches, oldest first.
func (s *Watches) List() guestapi.Watches {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := guestapi.Watches{Watches: []guestapi.Watch{}}
	for _, w := range s.list {
		out.Watches = append(out.Watches, w.snapshot())
	}
	return out
}

func (s *Watches) find(id core.WatchID) (*Watch, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.list {
		if w.info.ID == id { // never changes
			return w, nil
		}
	}
	return nil, core.Errorf(core.NotFound, core.CodeWatchNotFound, "there is no watch %q in this sandbox", core.Clip(string(id)))
}

// Has returns nil if there is such a watch.
func (s *Watches) Has(id core.WatchID) error {
	_, err := s.find(id)
	return err
}

// Delete ends a watch, and the streams of its readers.
func (s *Watches) Delete(id core.WatchID) error {
	w, err := s.find(id)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.list = slices.DeleteFunc(s.list, func(o *Watch) bool { return o == w })
	s.mu.Unlock()
	_ = w.file.Close()
	return nil
}

// Close ends all watches and waits for them.
func (s *Watches) Close() {
	s.mu.Lock()
	list := s.list
	s.list = nil
	s.mu.Unlock()
	for _, w := range list {
		_ = w.file.Close()
		<-w.done
	}
}

func (w *Watch) snapshot() guestapi.Watch {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.info
}

// Read passes the events after a number to emit, one by one. With follow it waits for more until the watch ends.
// An event of type overflow stands for those that are no longer kept.
func (s *Watches) Read(ctx context.Context, id core.WatchID, after int64, follow bool, emit func(guestapi.WatchEvent) error) error {
	w, err := s.find(id)
	if err != nil {
		return err
	}
	w.use(1)
	defer w.use(-1)
	for {
		list, ended, wake := w.behind(after)
		for _, e := range list {
			if err := emit(e); err != nil {
				return err
			}
			after = e.Seq
		}
		if len(list) > 0 {
			continue
		}
		if ended || !follow {
			return nil
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (w *Watch) use(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.active += n
	w.read = time.Now()
}

// batch is how many events a reader takes at once.
const batch = 256

func (w *Watch) behind(after int64) (list []guestapi.WatchEvent, ended bool, wake <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.wake == nil {
		w.wake = make(chan struct{})
	}
	if len(w.events) == 0 {
		return nil, w.info.Ended, w.wake
	}
	first := w.events[0].Seq
	if after < first-1 {
		return []guestapi.WatchEvent{{Seq: first - 1, Type: guestapi.WatchOverflow, Path: w.root}}, false, w.wake
	}
	from := int(min(max(after-first+1, 0), int64(len(w.events))))
	list = slices.Clone(w.events[from:min(from+batch, len(w.events))])
	if len(list) > 0 {
		w.given = max(w.given, list[len(list)-1].Seq)
	}
	return list, w.info.Ended, w.wake
}

// notify adds an event.
func (w *Watch) notify(kind, path string, dir bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	name := strings.TrimPrefix(strings.TrimPrefix(path, w.root), "/")
	if n := len(w.events); n > 0 && kind == guestapi.WatchWrite && w.events[n-1].Type == kind && w.events[n-1].Path == path && w.given < w.info.Last {
		return // nobody has read the first one
	}
	w.info.Last++
	w.events = append(w.events, guestapi.WatchEvent{Seq: w.info.Last, Type: kind, Path: path, Name: name, Dir: dir})
	w.bytes += 2 * len(path)
	for len(w.events) > maxEvents || w.bytes > maxEventBytes && len(w.events) > 1 {
		w.bytes -= 2 * len(w.events[0].Path)
		w.events[0] = guestapi.WatchEvent{}
		w.events = w.events[1:]
	}
	w.changed()
}

// changed wakes the readers. The caller holds mu.
func (w *Watch) changed() {
	if w.wake != nil {
		close(w.wake)
		w.wake = nil
	}
}

// end is called once, after the last event.
func (w *Watch) end() {
	_ = w.file.Close()
	for wd := range w.dirs {
		w.drop(wd)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.info.Ended = true
	w.changed()
}

// incomplete says that a directory is not watched.
func (w *Watch) incomplete() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.info.Incomplete = true
}

func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

func join(dir, name string) string { return filepath.Join(dir, name) }
