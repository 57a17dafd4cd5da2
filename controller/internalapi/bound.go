package internalapi

import (
	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/internal/boundjson"
)

// maxReport bounds a heartbeat: thousands of sandboxes with their consoles' tails.
const maxReport = 32 << 20

// reportBound returns the bound of a runner's message. A runner may have been taken over, and is trusted for its own sandboxes
// only. No text is cut: a message is taken whole or refused.
func reportBound(in any) boundjson.Bound {
	b := boundjson.Bound{Name: "the runner's message", Bytes: 1 << 20, Elements: 16 << 10, List: 4 << 10, Depth: 16}
	switch in.(type) {
	case *runnerapi.Heartbeat, *runnerapi.Beat: // a runner has some thousands of sandboxes and checkpoints
		b.Bytes, b.Elements, b.List = maxReport, 512<<10, 64<<10
	case *runnerapi.Flows:
		b.Bytes, b.Elements, b.List = maxReport, 512<<10, 32<<10
	case *runnerapi.BeginSeal:
		b.Bytes, b.Elements, b.List = maxReport, 64<<10, 64<<10
	case *runnerapi.CommitSeal: // controller/sealing bounds the objects
		b.Bytes, b.Elements, b.List = maxReport, 2<<20, 1<<20
	}
	b.String, b.Text = int(b.Bytes), int(b.Bytes)
	return b
}
