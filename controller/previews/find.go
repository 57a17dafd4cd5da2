package previews

import (
	"context"
	"maps"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sandboxhost"
)

// Everybody can ask for any name, so what that costs the database is bounded.
const (
	foundFor   = 2 * time.Second // a preview that was found is not read again for so long
	absentFor  = time.Second     // nor is one that was not
	keptFor    = time.Minute     // a name that had a preview is known as such for so long
	maxRecent  = 4096            // names with a preview that are remembered, and as many without one
	maxLookups = 4               // reads at the same time for names that are not known, and as many for those that are
	maxWaiting = 1024            // lookups of names that are not known that wait for one of these reads
	lookupTime = 5 * time.Second // of a lookup, its wait included
)

// lane is the part of the database's connections that one kind of request can use. Who comes first is served first.
type lane struct {
	places  *semaphore.Weighted
	most    int64 // that wait; 0: their number is bounded elsewhere
	waiting atomic.Int64
}

func newLane(most int64) *lane { return &lane{places: semaphore.NewWeighted(maxLookups), most: most} }

// enter waits for a place. leave must be called if there is no error.
func (l *lane) enter(ctx context.Context) error {
	defer l.waiting.Add(-1)
	if n := l.waiting.Add(1); (l.most == 0 || n <= l.most) && l.places.Acquire(ctx, 1) == nil {
		return nil
	}
	return errBusy
}

var errBusy error = core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable, "too many requests wait for the database, or it is too slow; repeat the request later")

func (l *lane) leave() { l.places.Release(1) }

// finding is what was found for a name.
type finding struct {
	preview Preview
	at      time.Time // when the read began
}

// recent remembers what was found. Its zero value is empty.
type recent struct {
	mu      sync.Mutex  // guards what follows
	changes [256]uint64 // how often this process has changed previews; workspaces share the counts
	found   map[sandboxhost.Target]finding
	absent  map[sandboxhost.Target]time.Time // when the read began

	foundFull, absentFull time.Time // until then a full map has nothing that is too old
}

// Recent returns what was found for a name in the last seconds: a preview, or that there is none. known is false if that is not known. A preview
// may have another epoch by now, or have been closed by another controller.
func (m *Manager) Recent(t sandboxhost.Target) (p Preview, known bool, err error) {
	now, r := time.Now(), &m.recent
	r.mu.Lock()
	defer r.mu.Unlock()
	if f, ok := r.found[t]; ok && now.Sub(f.at) < foundFor && (f.preview.ExpiresAt == nil || now.Before(*f.preview.ExpiresAt)) {
		return f.preview, true, nil
	}
	if at, ok := r.absent[t]; ok && now.Sub(at) < absentFor {
		return Preview{}, true, Absent()
	}
	return Preview{}, false, nil
}

// Changed forgets what was found for a workspace. It must be called after this process has changed previews of it.
func (m *Manager) Changed(id core.WorkspaceID) {
	r, bare := &m.recent, strings.TrimPrefix(string(id), prefix)
	r.mu.Lock()
	defer r.mu.Unlock()
	*r.count(bare)++
	maps.DeleteFunc(r.found, func(t sandboxhost.Target, _ finding) bool { return t.ID == bare })
	maps.DeleteFunc(r.absent, func(t sandboxhost.Target, _ time.Time) bool { return t.ID == bare })
}

// KeyEnded forgets the previews that were opened with a key.
func (m *Manager) KeyEnded(id core.KeyID) {
	r := &m.recent
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.changes { // what is being read now may have a preview of the key
		r.changes[i]++
	}
	maps.DeleteFunc(r.found, func(_ sandboxhost.Target, f finding) bool { return f.preview.KeyID == id })
}

// count needs mu. It is the count of the changes to a workspace.
func (r *recent) count(id string) *uint64 {
	var sum uint8
	for _, b := range []byte(id) {
		sum = sum*31 + b
	}
	return &r.changes[sum]
}

// begin says how many changes there were before a read, and whether the name had a preview lately.
func (r *recent) begin(t sandboxhost.Target) (changes uint64, had bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f, had := r.found[t]
	return *r.count(t.ID), had && time.Since(f.at) < keptFor
}

// put remembers what was found, unless previews have changed since the read began. At the bound, what is too old makes room.
func (r *recent) put(t sandboxhost.Target, began time.Time, changes uint64, p Preview, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if changes != *r.count(t.ID) {
		return
	}
	switch {
	case err == nil:
		delete(r.absent, t)
		if r.found == nil {
			r.found = map[sandboxhost.Target]finding{}
		}
		if makeRoom(r.found, &r.foundFull, began, foundFor, func(f finding) time.Time { return f.at }) {
			r.found[t] = finding{p, began}
		}
	case core.CategoryOf(err) == core.NotFound:
		delete(r.found, t)
		if r.absent == nil {
			r.absent = map[sandboxhost.Target]time.Time{}
		}
		if makeRoom(r.absent, &r.absentFull, began, absentFor, func(at time.Time) time.Time { return at }) {
			r.absent[t] = began
		}
	}
}

// makeRoom reports whether m has room for another entry. At the bound it deletes the entries that are older than life. It looks at them
// only when one may be that old, because a stranger who asks for unknown names keeps the map full: until is when the oldest will be.
func makeRoom[V any](m map[sandboxhost.Target]V, until *time.Time, now time.Time, life time.Duration, at func(V) time.Time) bool {
	if len(m) < maxRecent || now.Before(*until) {
		return len(m) < maxRecent
	}
	oldest := now
	maps.DeleteFunc(m, func(_ sandboxhost.Target, v V) bool {
		if now.Sub(at(v)) >= life {
			return true
		}
		if at(v).Before(oldest) {
			oldest = at(v)
		}
		return false
	})
	*until = oldest.Add(life)
	return len(m) < maxRecent
}

// Queue waits until another read may begin for somebody who has not been let in yet. leave must be called after the read.
func (m *Manager) Queue(ctx context.Context) (leave func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	if err := m.strangers.enter(ctx); err != nil {
		return nil, err
	}
	return m.strangers.leave, nil
}

// Lookup is Find for a request of somebody who has not been let in yet. Requests for one name share a read, and only a few reads are done at
// the same time. Names that had a preview lately do not wait for names that nobody knows. A client that goes away does not end the read.
func (m *Manager) Lookup(ctx context.Context, t sandboxhost.Target) (Preview, error) {
	changes, had := m.recent.begin(t)
	l := m.strangers
	if had {
		l = m.guests
	}
	done := m.lookups.DoChan(t.Host(strconv.FormatUint(changes, 10)), func() (any, error) {
		ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), lookupTime, errBusy)
		defer cancel()
		if err := l.enter(ctx); err != nil {
			return Preview{}, err
		}
		defer l.leave()
		began := time.Now()
		p, err := m.Find(ctx, t)
		m.recent.put(t, began, changes, p, err)
		return p, err
	})
	select {
	case <-ctx.Done():
		return Preview{}, context.Cause(ctx)
	case r := <-done:
		p, _ := r.Val.(Preview)
		return p, r.Err
	}
}
