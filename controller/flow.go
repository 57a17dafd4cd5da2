package controller

import (
	"context"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// Flow is what a workspace sent out, or tried to.
type Flow struct {
	core.Flow
	WorkspaceID core.WorkspaceID
}

// FlowMark is a place in a list of flows.
type FlowMark struct {
	At time.Time
	ID string
}

// FlowFilter selects flows of a workspace; zero fields do not filter. Newest first, those after After.
type FlowFilter struct {
	After   FlowMark
	Limit   int
	Outcome core.Outcome
	Host    string
}

// Effect is a flow that may have changed something outside, on the way to a checkpoint.
type Effect struct {
	Flow
	CheckpointID core.CheckpointID // the nearest ancestor, or the checkpoint itself, whose state has it behind it
	Depth        int               // of that one, generations below the root
}

// EffectMark is a place in a list of effects.
type EffectMark struct {
	Depth int
	FlowMark
}

// FlowTx keeps the journal of what left. There is no way to change or remove a flow.
type FlowTx interface {
	// InsertFlows keeps those of sandboxes that the runner has or had, as far as the quota goes.
	InsertFlows(ctx context.Context, runner core.RunnerID, list []core.Flow, q FlowQuota) (KeptFlows, error)
	// OwnSandboxes returns those that the runner has or had.
	OwnSandboxes(ctx context.Context, runner core.RunnerID, ids []core.SandboxID) ([]core.SandboxID, error)
	WorkspaceFlows(ctx context.Context, id core.WorkspaceID, f FlowFilter) ([]Flow, error)
	// OmittedFlows counts those of a workspace that were left out.
	OmittedFlows(ctx context.Context, id core.WorkspaceID) (OmittedFlows, error)
	// Effects lists what was changed outside on the way from the root to a checkpoint, in the order in which it happened.
	Effects(ctx context.Context, id core.CheckpointID, after EffectMark, limit int) ([]Effect, error)
	// TidyFlows makes partitions ahead and removes what is older than keep, by whole months.
	TidyFlows(ctx context.Context, keep time.Duration) error
}

// FlowQuota bounds the rows of flows. Beyond it, flows that changed nothing are left out: denied ones and read-only requests. They
// are counted. An effect is always kept, as is the end of what may have been one.
type FlowQuota struct {
	Workspace, Project int64
}

// The default quota: at some 500 bytes a row, 0.5 GB of a workspace and 2.5 GB of a project.
const (
	FlowsOfWorkspace = 1_000_000
	FlowsOfProject   = 5_000_000
)

// OmittedFlows are flows that were left out because of the quota. A batch that a runner sends twice, because the first answer was lost,
// counts twice.
type OmittedFlows struct {
	Count       int64
	First, Last time.Time
}

// KeptFlows is the outcome of an insertion of flows.
type KeptFlows struct {
	Fresh   []core.Flow // that were not there yet
	Omitted int64       // that have ended and were left out because of the quota
}

// MayOmit reports whether a flow may be left out when a quota is used up.
func MayOmit(f core.Flow) bool {
	if f.Outcome == core.FlowDenied && (f.Ended.IsZero() || f.Count > 0) {
		return true // it never began
	}
	switch f.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return true
	}
	return false
}

// maxFlows is how many are written with one statement.
const maxFlows = 1000

// RecordFlows keeps what a runner's sandboxes sent out. What is not of one of its own is not heard.
func (c *Controller) RecordFlows(ctx context.Context, runner core.RunnerID, in runnerapi.Flows) error {
	ctx = WithOrigin(ctx, Origin{Actor: string(runner), Action: "flows"})
	for list := in.Flows; len(list) > 0; {
		n := min(len(list), maxFlows)
		part, odd := plainFlows(list[:n])
		list = list[n:]
		var kept KeptFlows
		var foreign int
		err := c.store.InTx(ctx, System(), func(tx Tx) error {
			ids := map[core.SandboxID]bool{}
			for _, f := range part {
				ids[f.SandboxID] = true
			}
			asked := make([]core.SandboxID, 0, len(ids))
			for id := range ids {
				asked = append(asked, id)
			}
			own, err := tx.OwnSandboxes(ctx, runner, asked)
			if err != nil {
				return err
			}
			foreign = len(asked) - len(own)
			kept, err = tx.InsertFlows(ctx, runner, part, c.cfg.FlowQuota)
			return err
		})
		if err != nil {
			return err
		}
		if foreign > 0 || odd > 0 {
			c.log.WarnContext(ctx, "a runner told of flows that are not its own, or are none", "runner_id", runner, "sandboxes", foreign, "flows", odd)
		}
		if kept.Omitted > 0 {
			c.metrics.omitted.Add(float64(kept.Omitted))
			c.log.WarnContext(ctx, "flows without effect left out: their workspace or project has reached its bound of rows", "runner_id", runner, "flows", kept.Omitted)
		}
		for _, f := range kept.Fresh {
			if finished(f) {
				c.metrics.flows.WithLabelValues(string(f.Outcome), string(f.Spoken)).Add(float64(f.Flows()))
			}
		}
	}
	return nil
}

// finished reports whether all is known of a flow: nothing follows a denial.
func finished(f core.Flow) bool { return !f.Ended.IsZero() || f.Outcome == core.FlowDenied }

// plainFlows leaves out what is no flow and makes text of the rest that can be kept: it comes from guests.
func plainFlows(list []core.Flow) (plain []core.Flow, odd int) {
	for _, f := range list {
		if !isFlow(f) {
			odd++
			continue
		}
		f.At, f.Ended = f.At.UTC().Truncate(time.Microsecond), f.Ended.UTC().Truncate(time.Microsecond) // as the database has them
		f.Host, f.Method, f.Path = plainText(f.Host, 255), plainText(f.Method, 40), plainText(f.Path, 2048)
		f.Rule, f.Grant, f.Reason = plainText(f.Rule, 300), plainText(f.Grant, 64), plainText(f.Reason, 500)
		f = plainCount(f)
		f.Sent, f.Received, f.Status = max(f.Sent, 0), max(f.Received, 0), min(max(f.Status, 0), 999)
		plain = append(plain, f)
	}
	return plain, odd
}

// plainCount keeps a count only for denied flows, and bounds it and its time.
func plainCount(f core.Flow) core.Flow {
	const most = 1 << 50
	if f.Outcome != core.FlowDenied || f.Count <= 0 {
		f.Count, f.Last = 0, time.Time{}
		return f
	}
	f.Count = min(f.Count, most)
	if f.Last = f.Last.UTC().Truncate(time.Microsecond); f.Last.Before(f.At) || !f.Last.Before(lastAt) {
		f.Last = f.At
	}
	return f
}

// ends of what a clock may say.
var (
	firstAt = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	lastAt  = time.Date(3000, 1, 1, 0, 0, 0, 0, time.UTC)
)

func isFlow(f core.Flow) bool {
	switch f.Spoken {
	case core.SpokenHTTP, core.SpokenTLS, core.SpokenTCP:
	default:
		return false
	}
	switch f.Outcome {
	case core.FlowAllowed, core.FlowDenied, core.FlowCut, core.FlowFailed:
	default:
		return false
	}
	in := func(t time.Time) bool { return !t.Before(firstAt) && t.Before(lastAt) }
	if !in(f.At) || !f.Ended.IsZero() && !in(f.Ended) {
		return false
	}
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
	return f.ID != "" && len(f.ID) <= 64 && strings.Trim(f.ID, letters) == ""
}

// plainText is text of at most so many bytes that every part can keep.
func plainText(s string, limit int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "?"), "\x00", "?")
	if len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}

// OmittedFlows counts flows of a workspace that the quota left out.
func (c *Controller) OmittedFlows(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (OmittedFlows, error) {
	return read(ctx, c, InProject(project), func(tx Tx) (OmittedFlows, error) { return tx.OmittedFlows(ctx, id) })
}

// Flows lists what a workspace sent out, newest first.
func (c *Controller) Flows(ctx context.Context, project core.ProjectID, id core.WorkspaceID, f FlowFilter) ([]Flow, error) {
	return read(ctx, c, InProject(project), func(tx Tx) ([]Flow, error) {
		list, err := tx.WorkspaceFlows(ctx, id, f)
		if err == nil && len(list) == 0 {
			_, err = tx.Workspace(ctx, id)
		}
		return list, err
	})
}

// Effects lists what may have been changed outside on the way from the root to a checkpoint, in the order in which it happened.
func (c *Controller) Effects(ctx context.Context, project core.ProjectID, id core.CheckpointID, after EffectMark, limit int) ([]Effect, error) {
	return read(ctx, c, InProject(project), func(tx Tx) ([]Effect, error) {
		if _, err := tx.Checkpoint(ctx, id); err != nil {
			return nil, err
		}
		return tx.Effects(ctx, id, after, limit)
	})
}

// tidyFlows is the chore that keeps the journal's partitions.
func (c *Controller) tidyFlows(ctx context.Context) error {
	return c.store.InTx(ctx, System(), func(tx Tx) error { return tx.TidyFlows(ctx, c.cfg.FlowsKept) })
}
