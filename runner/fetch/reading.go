package fetch

import (
	"maps"
	"slices"
	"sync"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// readings has, for each checkpoint in the store, the number of fetches under way that read it.
type readings struct {
	mu    sync.Mutex // guards count
	count map[core.CheckpointID]int
}

// Reading notes a fetch from sources: the checkpoint itself and the root of its tree. The fetch reads the ancestors in between, if at all, only in
// its first moments. The returned function ends the fetch.
func (f *Fetcher) Reading(sources []runnerapi.Stored) (end func()) {
	ids := []core.CheckpointID{sources[0].CheckpointID, sources[len(sources)-1].CheckpointID}
	f.readings.add(ids, 1)
	return func() { f.readings.add(ids, -1) }
}

func (f *readings) add(ids []core.CheckpointID, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.count == nil {
		f.count = make(map[core.CheckpointID]int)
	}
	for _, id := range ids {
		if f.count[id] += n; f.count[id] == 0 {
			delete(f.count, id)
		}
	}
}

// reads reports whether a fetch under way reads a checkpoint.
func (f *readings) reads(id core.CheckpointID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count[id] > 0
}

// Fetching returns the checkpoints whose objects in the store this host reads or may still read: those of fetches under way and of images that
// are not complete. Heartbeats name them. As long as they do, the objects stay in the store, even if the checkpoints are deleted.
func (f *Fetcher) Fetching() []core.CheckpointID {
	ids := make(map[core.CheckpointID]bool)
	f.readings.mu.Lock()
	for id := range f.readings.count {
		ids[id] = true
	}
	f.readings.mu.Unlock()
	for _, id := range f.cfg.Lazy.Sources() {
		ids[id] = true
	}
	return slices.Sorted(maps.Keys(ids))
}
