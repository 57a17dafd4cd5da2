package retention

import (
	"context"
	"log/slog"
	"time"

	"github.com/coppice-dev/coppice/core"
)

const (
	maxTree        = 2_000_000 // nodes of one plan; each takes about 150 bytes of memory
	planPlaces     = 2         // plans for requests that are made at the same time; the loop of stored policies makes one more
	retentionEvery = time.Minute
	retentionBatch = 100             // due policies that one query returns
	retentionLease = 2 * time.Minute // how long a controller holds a policy before it must renew its claim
	retentionPause = 20              // a policy waits this many times the duration of its plan, so large trees take a twentieth of a processor
	retentionIdle  = time.Hour       // after this time a tree is read even without a change
	planUse        = 5 * time.Minute // how long deletions follow one plan
	retentionTurns = 10              // full batches in one turn of the loop
)

// Lease is how long a controller holds a policy before it must renew its claim.
const Lease = retentionLease

// TreePolicy is a Policy, with the annotation that has the score.
type TreePolicy struct {
	Policy
	Annotation string // the key of the annotation; its number is the score
}

// Validate refuses a policy that would delete everything.
func (p TreePolicy) Validate() error {
	if p.KeepBest == 0 && p.MaxAge == 0 && p.MaxBytes == 0 {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the policy needs at least one of keep_best, max_age_seconds and max_bytes: it would delete everything")
	}
	return nil
}

// Stored is the stored policy of a checkpoint and of everything that descends from it.
type Stored struct {
	ProjectID  core.ProjectID
	Checkpoint core.CheckpointID
	Policy     TreePolicy
	Version    int64
	UpdatedAt  time.Time
}

// Walk is the position of a walk through a checkpoint and everything that descends from it. At the beginning only ID is set.
type Walk struct {
	ID    core.CheckpointID
	Begun bool
	More  bool // in a walk from a root: there may be further nodes

	Root  bool              // ID is the root of a tree, so the walk reads generation by generation
	Depth int               // of the last node
	After core.CheckpointID // the last node

	Open []Branch // in other walks: the nodes whose children the walk has yet to read
}

// Branch is a node. The walk has yet to read its children with ids above After.
type Branch struct{ Parent, After core.CheckpointID }

// Done says whether the walk is at its end.
func (w Walk) Done() bool { return w.Begun && !w.More && len(w.Open) == 0 }

// Store runs transactions. Package controller/postgres has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	// InSystem runs fn in a transaction that sees all projects.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx keeps stored policies, and reads trees.
type Tx interface {
	// Find fails with a NotFound error if the transaction sees no such checkpoint.
	Find(ctx context.Context, id string) error
	// Subtree returns the next nodes of a walk through a checkpoint and everything that descends from it, with their scores from an annotation. It
	// also returns the next position of the walk. It reads a bounded number of rows. Nodes come after their parents. Checkpoints that are
	// made during the walk may be missing.
	Subtree(ctx context.Context, w Walk, annotation string) ([]Node, Walk, error)
	// Retention returns the policy of a checkpoint; NotFound when it has none.
	Retention(ctx context.Context, id core.CheckpointID) (Stored, error)
	// DueRetentions returns due policies of all projects, those that have waited longest first. A policy is due if it is new, if its
	// project has changed since its last round, or if its time has come. A policy that is claimed or rests is not due.
	DueRetentions(ctx context.Context, limit int) ([]Stored, error)
	// ClaimRetention claims a due policy for a time and returns the number of the claim; 0: another controller was first.
	ClaimRetention(ctx context.Context, r Stored, lease time.Duration) (turn int64, err error)
	// RenewRetention extends a claim. It fails with STATE_CONFLICT if the claim was lost or the policy has changed.
	RenewRetention(ctx context.Context, r Round, lease time.Duration) error
	// EndRetention ends a claim. It changes nothing if the claim was lost.
	EndRetention(ctx context.Context, r Round, end End) error
	PutRetention(ctx context.Context, r Stored) (Stored, error)
	DeleteRetention(ctx context.Context, id core.CheckpointID) error
}

// Config says what rounds work with.
type Config struct {
	// Delete deletes the newest part of what a plan removes, at most Batch of it, and waits for that until a time. It calls renew from time to
	// time.
	Delete func(ctx context.Context, due Stored, plan Plan, remove []Removal, until time.Time, renew func() error) (done bool, err error)
	Batch  int
	Failed func() // hears that a turn of the loop failed
	Log    *slog.Logger
}

// Rounds carries out stored policies, and makes plans for requests. It is safe for concurrent use.
type Rounds struct {
	cfg      Config
	store    Store
	planning chan struct{} // a place for each plan that is being made for a request
}

// New makes rounds. It starts nothing.
func New(cfg Config, store Store) *Rounds {
	return &Rounds{cfg: cfg, store: store, planning: make(chan struct{}, planPlaces)}
}

func inProject[T any](ctx context.Context, store Store, project core.ProjectID, query func(Tx) (T, error)) (out T, err error) {
	err = store.InProject(ctx, project, func(tx Tx) (err error) {
		out, err = query(tx)
		return err
	})
	return out, err
}

// PutRetention stores the policy of a checkpoint and of everything that descends from it.
func (r *Rounds) PutRetention(ctx context.Context, project core.ProjectID, id core.CheckpointID, policy TreePolicy) (Stored, error) {
	if err := policy.Validate(); err != nil {
		return Stored{}, err
	}
	return inProject(ctx, r.store, project, func(tx Tx) (Stored, error) {
		if err := tx.Find(ctx, string(id)); err != nil {
			return Stored{}, err
		}
		return tx.PutRetention(ctx, Stored{ProjectID: project, Checkpoint: id, Policy: policy})
	})
}

// Retention returns the stored policy of a checkpoint.
func (r *Rounds) Retention(ctx context.Context, project core.ProjectID, id core.CheckpointID) (Stored, error) {
	return inProject(ctx, r.store, project, func(tx Tx) (Stored, error) {
		if err := tx.Find(ctx, string(id)); err != nil {
			return Stored{}, err
		}
		return tx.Retention(ctx, id)
	})
}

// DeleteRetention removes the stored policy of a checkpoint. It is no error if there is none.
func (r *Rounds) DeleteRetention(ctx context.Context, project core.ProjectID, id core.CheckpointID) error {
	return r.store.InProject(ctx, project, func(tx Tx) error {
		if err := tx.Find(ctx, string(id)); err != nil {
			return err
		}
		return tx.DeleteRetention(ctx, id)
	})
}
