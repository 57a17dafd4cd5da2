package httpapi

import (
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Peers says which other runners may read objects here. A certificate is good for a day, so it does not say whether its runner was removed
// from the cluster meanwhile; the controllers do, with each answer to a heartbeat. While they are silent for longer than they said, no
// runner is allowed.
type Peers struct {
	mu      sync.Mutex // guards what follows
	removed map[core.RunnerID]bool
	until   time.Time
}

// NewPeers returns peers that allow nobody before the first call of Learn.
func NewPeers() *Peers { return &Peers{} }

// Learn replaces the list of runners that were removed. It holds until good has passed since the time at.
func (p *Peers) Learn(removed []core.RunnerID, at time.Time, good time.Duration) {
	list := make(map[core.RunnerID]bool, len(removed))
	for _, id := range removed {
		list[id] = true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.removed, p.until = list, at.Add(good)
}

// allow refuses a runner that was removed, although its certificate is good. Without a recent list of removed runners it refuses all.
func (p *Peers) allow(id core.RunnerID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.removed[id]:
		return core.Errorf(core.PermissionDenied, core.CodeRunnerRevoked, "runner %s was removed from this cluster", id)
	case time.Now().After(p.until):
		return core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "this runner has no recent list of removed runners from a controller; read from the store instead")
	}
	return nil
}
