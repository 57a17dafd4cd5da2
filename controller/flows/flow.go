package flows

import (
	"cmp"
	"context"
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Flow is a request or connection that a workspace sent or tried to send.
type Flow struct {
	core.Flow
	WorkspaceID core.WorkspaceID
	Counted     bool // it is a count of the flows of one minute or day, without details of the single flows
	Opaque      bool // for a count: no request was seen in its flows
}

// Mark is a place in a list of flows.
type Mark struct {
	At time.Time
	ID string
}

// Filter selects flows of a workspace, newest first, beginning after the mark After. Zero fields do not filter.
type Filter struct {
	After   Mark
	Limit   int
	Outcome core.Outcome
	Host    string
}

// Effect is a flow on the path to a checkpoint that may have changed something outside.
type Effect struct {
	Flow
	CheckpointID core.CheckpointID // the first checkpoint on the path whose state is from after the flow
	Depth        int               // of that checkpoint, in generations below the root
}

// EffectMark is a place in a list of effects.
type EffectMark struct {
	Depth int
	Mark
}

// Store runs transactions on the journal. Package controller/postgres has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction that sees one project, InSystem in one that sees all of them. Each commits when fn returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx keeps the journal. No method changes or removes a single flow.
type Tx interface {
	// InsertFlows keeps the flows of sandboxes that the runner has or had: as rows up to the quota, and beyond it as counts.
	InsertFlows(ctx context.Context, runner core.RunnerID, list []core.Flow, q Quota) (Kept, error)
	// OwnSandboxes returns those of the sandboxes that the runner has or had.
	OwnSandboxes(ctx context.Context, runner core.RunnerID, ids []core.SandboxID) ([]core.SandboxID, error)
	WorkspaceFlows(ctx context.Context, id core.WorkspaceID, f Filter) ([]Flow, error)
	// OmittedFlows counts the flows of a workspace that have no rows.
	OmittedFlows(ctx context.Context, id core.WorkspaceID) (Omitted, error)
	// Effects lists the effects on the path from the root to a checkpoint, in the order in which they happened.
	Effects(ctx context.Context, id core.CheckpointID, after EffectMark, limit int) ([]Effect, error)
	// Find fails with a NotFound error if the transaction sees no such workspace or checkpoint.
	Find(ctx context.Context, id string) error
	// TidyFlows makes the next partitions and removes flows that are older than keep, by whole months.
	TidyFlows(ctx context.Context, keep time.Duration) error
	// FoldFlowCounts adds at most limit counts of old minutes to the counts of their days. It returns how many it has found.
	FoldFlowCounts(ctx context.Context, limit int) (int, error)
	// TidyFlowCounts removes at most limit counts that are older than keep. It returns how many it has removed.
	TidyFlowCounts(ctx context.Context, keep time.Duration, limit int) (int, error)
}

// Kind says which quota the rows of a flow belong to. The beginning and the end of a flow have one kind.
type Kind string

// The kinds of flows.
const (
	KindEffect Kind = "effect" // it may have changed something outside, unless its end says that nothing was sent
	KindRead   Kind = "read"   // a request that only reads
	KindDenied Kind = "denied" // it was denied before it began
)

// KindOf returns the kind of a flow.
func KindOf(f core.Flow) Kind {
	if f.Outcome == core.FlowDenied && (f.Ended.IsZero() || f.Count > 0) {
		return KindDenied
	}
	switch f.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return KindRead
	}
	return KindEffect
}

// RowQuota is how many rows a workspace may have, and how many all workspaces of a project may have.
type RowQuota struct {
	Workspace, Project int64
}

// Quota bounds the rows of flows. Each kind of flow has its own bound, so denied flows do not
// take the place of allowed ones. Flows beyond the bound are counted by minute and host. The end of
// a flow has a row if its beginning has one, so there may be up to twice as many rows.
type Quota struct {
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

// WithDefaults returns the quota with the default of each bound that is 0.
func (q Quota) WithDefaults() Quota {
	set := func(r *RowQuota, workspace, project int64) {
		r.Workspace, r.Project = cmp.Or(r.Workspace, workspace), cmp.Or(r.Project, project)
	}
	set(&q.Reads, FlowsOfWorkspace, FlowsOfProject)
	set(&q.Denied, DeniedOfWorkspace, cmp.Or(5*q.Denied.Workspace, DeniedOfProject))
	set(&q.Effects, EffectsOfWorkspace, cmp.Or(10*q.Effects.Workspace, EffectsOfProject))
	return q
}

// DefaultKept is how long flows are kept by default.
const DefaultKept = 90 * 24 * time.Hour

// The bounds of counts of flows.
const (
	CountsOfMinute = 16            // rows by host and port, for one sandbox, minute and kind; the same number again for flows with grants
	CountsOfDay    = 64            // the same for a day
	CountsOfRules  = 256           // further rows by rule, for flows with grants to more hosts than that
	MinutesKept    = 2 * time.Hour // then counts of minutes become counts of days
	CountedBatches = 64            // of each runner; a flow of these batches that comes again is not counted again
	MaxEffectRows  = 10_000        // rows that are counted for a node of a tree
)

// Omitted are flows that have no rows of their own because of the quota: they are counted by host.
type Omitted struct {
	Count       int64
	First, Last time.Time
}

// Kept is the outcome of an insertion of flows.
type Kept struct {
	Fresh   []core.Flow // that were new
	Omitted int64       // flows that are counted and have no rows because of the quota
}
