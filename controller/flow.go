package controller

import (
	"cmp"
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
	Counted     bool // it is a count of flows of one minute or day, without what single ones asked for
	Opaque      bool // of a count: no request was seen in its flows
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
	// InsertFlows keeps those of sandboxes that the runner has or had: as rows as far as the quota goes, and then as counts.
	InsertFlows(ctx context.Context, runner core.RunnerID, list []core.Flow, q FlowQuota) (KeptFlows, error)
	// OwnSandboxes returns those that the runner has or had.
	OwnSandboxes(ctx context.Context, runner core.RunnerID, ids []core.SandboxID) ([]core.SandboxID, error)
	WorkspaceFlows(ctx context.Context, id core.WorkspaceID, f FlowFilter) ([]Flow, error)
	// OmittedFlows counts those of a workspace that have no rows.
	OmittedFlows(ctx context.Context, id core.WorkspaceID) (OmittedFlows, error)
	// Effects lists what was changed outside on the way from the root to a checkpoint, in the order in which it happened.
	Effects(ctx context.Context, id core.CheckpointID, after EffectMark, limit int) ([]Effect, error)
	// TidyFlows makes partitions ahead and removes what is older than keep, by whole months.
	TidyFlows(ctx context.Context, keep time.Duration) error
	// FoldFlowCounts adds at most limit counts of old minutes to those of their days and returns how many it has found.
	FoldFlowCounts(ctx context.Context, limit int) (int, error)
	// TidyFlowCounts removes at most limit counts that are older than keep and returns how many it has removed.
	TidyFlowCounts(ctx context.Context, keep time.Duration, limit int) (int, error)
}

// FlowKind says which quota the rows of a flow belong to. The beginning and the end of a flow have one kind.
type FlowKind string

// The kinds of flows.
const (
	FlowEffect  FlowKind = "effect" // it may have changed something outside, unless its end says that nothing was sent
	FlowRead    FlowKind = "read"   // a request that only reads
	FlowRefused FlowKind = "denied" // it was denied before it began
)

// KindOf returns the kind of a flow.
func KindOf(f core.Flow) FlowKind {
	if f.Outcome == core.FlowDenied && (f.Ended.IsZero() || f.Count > 0) {
		return FlowRefused
	}
	switch f.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return FlowRead
	}
	return FlowEffect
}

// RowQuota is how many rows a workspace may have, and how many all workspaces of a project may have.
type RowQuota struct {
	Workspace, Project int64
}

// FlowQuota bounds the rows of flows. Each kind of flow has its own bound, so denied flows do not
// take the place of allowed ones. Flows beyond the bound are counted by minute and host. The end of
// a flow has a row if its beginning has one, so there may be up to twice as many rows.
type FlowQuota struct {
	Reads, Denied, Effects RowQuota
}

// The default quotas. A row takes some 500 bytes.
const (
	FlowsOfWorkspace   = 1_000_000
	FlowsOfProject     = 5_000_000
	DeniedOfWorkspace  = 250_000
	DeniedOfProject    = 1_250_000
	EffectsOfWorkspace = 100_000
	EffectsOfProject   = 1_000_000
)

func (q FlowQuota) withDefaults() FlowQuota {
	set := func(r *RowQuota, workspace, project int64) {
		r.Workspace, r.Project = cmp.Or(r.Workspace, workspace), cmp.Or(r.Project, project)
	}
	set(&q.Reads, FlowsOfWorkspace, FlowsOfProject)
	set(&q.Denied, DeniedOfWorkspace, cmp.Or(5*q.Denied.Workspace, DeniedOfProject))
	set(&q.Effects, EffectsOfWorkspace, cmp.Or(10*q.Effects.Workspace, EffectsOfProject))
	return q
}

// The bounds of counts of flows.
const (
	CountsOfMinute = 16            // rows by host and port, for one sandbox, minute and kind; as many more for flows with grants
	CountsOfDay    = 64            // the same for a day
	CountsOfRules  = 256           // further rows by rule, for flows with grants to more hosts than that
	MinutesKept    = 2 * time.Hour // until minutes become days
	CountedBatches = 64            // of each runner, in which a flow that comes again is found and not counted again
	MaxEffectRows  = 10_000        // rows that are counted for a node of a tree
)

// OmittedFlows are flows that have no rows of their own because of the quota: they are counted by host.
type OmittedFlows struct {
	Count       int64
	First, Last time.Time
}

// KeptFlows is the outcome of an insertion of flows.
type KeptFlows struct {
	Fresh   []core.Flow // that were not there yet
	Omitted int64       // that are counted and have no rows because of the quota
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
			c.log.WarnContext(ctx, "flows are counted by host and have no rows: their workspace or project has reached its bound of rows", "runner_id", runner, "flows", kept.Omitted)
		}
		for _, f := range kept.Fresh {
			if f.Final() {
				c.metrics.flows.WithLabelValues(string(f.Outcome), string(f.Spoken)).Add(float64(f.Flows()))
			}
		}
	}
	return nil
}

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
		f.Sent, f.Received, f.Status = min(max(f.Sent, 0), maxCount), min(max(f.Received, 0), maxCount), min(max(f.Status, 0), 999)
		plain = append(plain, f)
	}
	return plain, odd
}

// maxCount is the largest number that one record may say: sums of many records do not overflow.
const maxCount = 1 << 50

// plainCount keeps a count only for denied flows, and bounds it and its time.
func plainCount(f core.Flow) core.Flow {
	if f.Outcome != core.FlowDenied || f.Count <= 0 {
		f.Count, f.Last = 0, time.Time{}
		return f
	}
	f.Count = min(f.Count, maxCount)
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

// OmittedFlows counts flows of a workspace that have no rows.
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

// countsBatch is how many counts one transaction folds or removes.
const countsBatch = 5000

// tidyFlows is the chore that keeps the journal's partitions and its counts.
func (c *Controller) tidyFlows(ctx context.Context) error {
	return c.parts(ctx,
		part{"flow_partitions", func(ctx context.Context) error {
			return c.store.InTx(ctx, System(), func(tx Tx) error { return tx.TidyFlows(ctx, c.cfg.FlowsKept) })
		}},
		part{"fold_flow_counts", func(ctx context.Context) error {
			return c.batches(ctx, countsBatch, func(tx Tx) (int, error) { return tx.FoldFlowCounts(ctx, countsBatch) })
		}},
		part{"flow_counts", func(ctx context.Context) error {
			return c.batches(ctx, countsBatch, func(tx Tx) (int, error) { return tx.TidyFlowCounts(ctx, c.cfg.FlowsKept, countsBatch) })
		}})
}
