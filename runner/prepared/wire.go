package prepared

import (
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// Serve answers a request of a controller for machines.
func (p *Pool[Machine]) Serve(in runnerapi.Prepare) (out runnerapi.Prepared, err error) {
	if len(in.Asks) > runnerapi.MaxPrepareAsks {
		return out, core.Errorf(core.Invalid, core.CodeInvalidField, "asks: at most %d in one request", runnerapi.MaxPrepareAsks)
	}
	list := make([]Ask, len(in.Asks))
	for i, a := range in.Asks {
		if len(a.CA) > maxAuthority || a.ForSeconds > maxFor.Seconds() {
			return out, core.Errorf(core.Invalid, core.CodeInvalidField, "asks.%d: its authority has at most %d bytes, and its time at most %s", i, maxAuthority, maxFor)
		}
		list[i] = Ask{
			Checkpoint: a.CheckpointID, Count: a.Count, Authority: a.CA, Version: a.Version, Moves: a.Moves, For: time.Duration(a.ForSeconds * float64(time.Second)),
		}
	}
	out.Max, out.Asks = p.cfg.Max, make([]runnerapi.PreparedState, len(list))
	for i, a := range p.Ask(list) {
		out.Asks[i] = runnerapi.PreparedState{Instance: a.Instance, Ready: a.Ready, MemoryBytes: a.MemoryBytes, GivenUp: a.GivenUp, PreparedCounts: a.Counts}
	}
	return out, nil
}
