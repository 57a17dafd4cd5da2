package fakeguest

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// Watch is a watch with all its events.
type Watch struct {
	guestapi.Watch

	Events []guestapi.WatchEvent
}

// notify adds an event to the watches that see a path.
func (s *State) notify(kind, path string) {
	for _, w := range s.Watches {
		name, ok := strings.CutPrefix(path, strings.TrimSuffix(w.Path, "/")+"/")
		if !ok || strings.Contains(name, "/") && !w.Recursive {
			continue
		}
		w.Last++
		w.Events = append(w.Events, guestapi.WatchEvent{Seq: w.Last, Type: kind, Path: path, Name: name})
	}
}

func (s *State) createWatch(_ *http.Request, req guestapi.CreateWatch) (guestapi.Watch, error) {
	p := meaning(req.Path, req.User)
	info, err := s.Stat(p)
	if err == nil && info.Type != "dir" {
		err = conflict(p, "is not a directory")
	}
	if err != nil {
		return guestapi.Watch{}, err
	}
	made := guestapi.Watch{ID: core.NewID[core.WatchID](), Path: p, Recursive: req.Recursive, User: req.User, CreatedAt: time.Now().UTC()}
	s.Watches = append(s.Watches, &Watch{Watch: made})
	return made, nil
}

func (s *State) listWatches(*http.Request) (guestapi.Watches, error) {
	out := guestapi.Watches{Watches: []guestapi.Watch{}}
	for _, w := range s.Watches {
		out.Watches = append(out.Watches, w.Watch)
	}
	return out, nil
}

// watch returns the place of the watch that a request names.
func (s *State) watch(r *http.Request) (int, error) {
	id := r.PathValue("id")
	i := slices.IndexFunc(s.Watches, func(w *Watch) bool { return string(w.ID) == id })
	if i < 0 {
		return i, core.Errorf(core.NotFound, core.CodeWatchNotFound, "there is no watch %q in this sandbox", core.Clip(id))
	}
	return i, nil
}

func (s *State) deleteWatch(r *http.Request) (none, error) {
	i, err := s.watch(r)
	if err == nil {
		s.Watches = slices.Delete(s.Watches, i, i+1)
	}
	return none{}, err
}

// watchEvents sends the events of a watch, one a line.
func (g *Guest) watchEvents(w http.ResponseWriter, r *http.Request) error {
	after, err := answer.IntParam(r, "after", 0)
	if err != nil {
		return err
	}
	if err := g.view(func(s *State) error { _, err := s.watch(r); return err }); err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusOK)
	_ = g.sendEvents(w, r, after) // an error means that the reader is gone, or the watch
	return nil
}

func (g *Guest) sendEvents(w http.ResponseWriter, r *http.Request, after int64) error {
	follow := answer.BoolParam(r, "follow")
	for lines := json.NewEncoder(w); ; {
		if err := http.NewResponseController(w).Flush(); err != nil {
			return err
		}
		var list []guestapi.WatchEvent
		if err := g.await(r.Context(), func(s *State) (bool, error) {
			i, err := s.watch(r)
			if err == nil {
				events := s.Watches[i].Events
				list = slices.Clone(events[min(int(after), len(events)):])
			}
			return len(list) > 0 || !follow, err
		}); err != nil {
			return err
		}
		for _, e := range list {
			if err := lines.Encode(e); err != nil {
				return err
			}
			after = e.Seq
		}
		if !follow {
			return nil
		}
	}
}
