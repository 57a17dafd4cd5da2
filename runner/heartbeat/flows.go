package heartbeat

import (
	"context"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// The pauses between attempts to report flows.
const (
	firstFlowPause = 100 * time.Millisecond
	lastFlowPause  = 10 * time.Second
)

// Deliver reports to the controllers what sandboxes send out, until ctx ends. What they have not answered stays on this host and is reported again:
// nothing is given up.
func (l *Link) Deliver(ctx context.Context) error {
	var after int64
	for ctx.Err() == nil {
		flows, last, err := l.runner.Flows(ctx, after)
		if err == nil {
			if err = l.sendFlows(ctx, flows); err == nil {
				after = last
			}
		}
		if err != nil && ctx.Err() == nil {
			l.cfg.Log.ErrorContext(ctx, "the flows of sandboxes were not read", "err", err)
			_ = pace.Pause(ctx, lastFlowPause)
		}
	}
	return nil
}

// sendFlows sends flows to a controller. It tries until one has accepted them, or ctx ends.
func (l *Link) sendFlows(ctx context.Context, flows []core.Flow) error {
	path := strings.Replace(runnerapi.PathFlows, "{id}", string(l.runner.ID()), 1)
	for wait := firstFlowPause; ; wait = min(2*wait, lastFlowPause) {
		err := l.post(ctx, path, runnerapi.Flows{Flows: flows}, nil)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		l.cfg.Log.WarnContext(ctx, "the flows of sandboxes were not reported", "flows", len(flows), "again_ms", core.Milliseconds(wait), "err", err)
		_ = pace.Pause(ctx, wait)
	}
}
