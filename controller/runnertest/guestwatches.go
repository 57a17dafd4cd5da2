package runnertest

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// watch is a watch with all its events, as lines. The guest's lock guards it.
type watch struct {
	view    controller.GuestWatch
	events  []string
	changed chan struct{} // closed and replaced when events come, or it is deleted
	deleted bool
}

// cloneWatches are the watches of a fork.
func cloneWatches(list []*watch) []*watch {
	var out []*watch
	for _, w := range list {
		out = append(out, &watch{view: w.view, events: slices.Clone(w.events), changed: make(chan struct{})})
	}
	return out
}

// notify adds an event to the watches that see a path. The caller holds mu.
func (g *guest) notify(kind, path string) {
	for _, w := range g.watches {
		name, ok := strings.CutPrefix(path, strings.TrimSuffix(w.view.Path, "/")+"/")
		if !ok || strings.Contains(name, "/") && !w.view.Recursive {
			continue
		}
		w.view.Last++
		line, _ := json.Marshal(map[string]any{"seq": w.view.Last, "type": kind, "path": path, "name": name, "dir": false})
		w.events = append(w.events, string(line)+"\n")
		close(w.changed)
		w.changed = make(chan struct{})
	}
}

func (g *guest) createWatch(w http.ResponseWriter, q *http.Request) {
	in, ok := read[controller.CreateWatch](w, q)
	if !ok {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	p := home(in.Path, in.User)
	if info, ok := g.look(p); !ok || info.Type != "dir" {
		reply(w, nil, noFile(p))
		return
	}
	made := &watch{changed: make(chan struct{})}
	made.view = controller.GuestWatch{ID: core.NewID[core.WatchID](), Path: p, Recursive: in.Recursive, User: in.User, CreatedAt: time.Now().UTC()}
	g.watches = append(g.watches, made)
	reply(w, made.view, nil)
}

func (g *guest) listWatches(w http.ResponseWriter, _ *http.Request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	list := []controller.GuestWatch{}
	for _, one := range g.watches {
		list = append(list, one.view)
	}
	reply(w, map[string]any{"watches": list}, nil)
}

// findWatch returns the place of a watch, or answers. The caller holds mu.
func (g *guest) findWatch(w http.ResponseWriter, q *http.Request) int {
	i := slices.IndexFunc(g.watches, func(one *watch) bool { return string(one.view.ID) == q.PathValue("id") })
	if i < 0 {
		reply(w, nil, core.Errorf(core.NotFound, core.CodeWatchNotFound, "no watch %s", q.PathValue("id")))
	}
	return i
}

func (g *guest) deleteWatch(w http.ResponseWriter, q *http.Request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if i := g.findWatch(w, q); i >= 0 {
		g.watches[i].deleted = true
		close(g.watches[i].changed)
		g.watches[i].changed = make(chan struct{})
		g.watches = slices.Delete(g.watches, i, i+1)
		reply(w, nil, nil)
	}
}

func (g *guest) watchEvents(w http.ResponseWriter, q *http.Request) {
	g.mu.Lock()
	i := g.findWatch(w, q)
	if i < 0 {
		g.mu.Unlock()
		return
	}
	one := g.watches[i]
	g.mu.Unlock()
	after, _ := strconv.Atoi(q.URL.Query().Get("after"))
	w.Header().Set("Content-Type", "application/x-ndjson")
	_ = http.NewResponseController(w).Flush() // the reader may have gone
	for {
		g.mu.Lock()
		list, over, changed := slices.Clone(one.events[min(after, len(one.events)):]), one.deleted, one.changed
		g.mu.Unlock()
		after += len(list)
		_, _ = w.Write([]byte(strings.Join(list, ""))) // likewise
		_ = http.NewResponseController(w).Flush()
		if over || q.URL.Query().Get("follow") != "1" {
			return
		}
		select {
		case <-changed:
		case <-q.Context().Done():
			return
		}
	}
}
