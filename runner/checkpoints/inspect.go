package checkpoints

import "github.com/coppice-dev/coppice/core"

// State is what a Store knows of its checkpoints.
type State struct {
	Records map[core.CheckpointID]*Record
	Trash   map[core.CheckpointID]Trashed
	Held    map[core.CheckpointID]int
	Awaited bool // somebody waits until a checkpoint is no longer in use
}

// Inspect calls look with the state of the store, under its lock. Tests also change the maps, to what an earlier version of the runner or a fault
// would have left.
func (s *Store) Inspect(look func(State)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	look(State{Records: s.records, Trash: s.trash, Held: s.held, Awaited: s.freed != nil})
}
