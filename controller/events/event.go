// Package events passes on what happens to workspaces, checkpoints and operations. Triggers of the
// database write the events. A Feed reads their table once for all streams of a process, and passes
// on each event once, in the order of the ids, also when another database server takes over.
package events

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// Event is a change of state of a workspace or a checkpoint, or the end of an operation.
type Event struct {
	ID           int64
	ProjectID    core.ProjectID
	Type         string // object.state: workspace.ready, checkpoint.captured, operation.failed
	WorkspaceID  core.WorkspaceID
	CheckpointID core.CheckpointID
	Root         core.CheckpointID // of the tree in which it happened
	OperationID  core.OperationID
	Data         json.RawMessage // the data of this type
	CreatedAt    time.Time
}

// Filter selects events; zero fields do not filter. A type is a whole type, or its part before the dot.
type Filter struct {
	Project     core.ProjectID
	Root        core.CheckpointID
	WorkspaceID core.WorkspaceID
	Types       []string
}

// Match reports whether an event matches. Tx.Events does the same with rows.
func (f Filter) Match(e Event) bool {
	switch {
	case f.Project != "" && f.Project != e.ProjectID, f.Root != "" && f.Root != e.Root, f.WorkspaceID != "" && f.WorkspaceID != e.WorkspaceID:
		return false
	case len(f.Types) == 0:
		return true
	}
	object, _, _ := strings.Cut(e.Type, ".")
	return slices.Contains(f.Types, e.Type) || slices.Contains(f.Types, object)
}

// Marks bound the events that can be read.
type Marks struct {
	Floor  int64 // the highest id that is no longer kept
	Newest int64 // the highest id that was handed out
}

// Tail has the events that are visible at the end of the table, and the server that answered.
type Tail struct {
	Events  []Event // of all projects, by id
	Settled uint64  // the lowest id of a transaction that had not ended: what all earlier ones wrote is visible in Events
	Newest  int64   // the highest id that was handed out
	// History changes when another server takes over, which may lack the last transactions of the one before. Ids of a later
	// history are above all ids of the earlier ones.
	History int64
}

// Store runs transactions. Package controller/postgres has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	// InSystem runs fn in a transaction that sees all projects.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx reads events. Triggers write them.
type Tx interface {
	// Workspace and Checkpoint fail with a NotFound error if the transaction sees no such object.
	Workspace(ctx context.Context, id core.WorkspaceID) (model.Workspace, error)
	Checkpoint(ctx context.Context, id core.CheckpointID) (model.Checkpoint, error)
	// Events returns at most limit events with ids above after and up to until, by id.
	Events(ctx context.Context, f Filter, after, until int64, limit int) ([]Event, error)
	// TailEvents returns the visible events of all projects above after.
	TailEvents(ctx context.Context, after int64, limit int) (Tail, error)
	EventMarks(ctx context.Context) (Marks, error)
	// Transaction gives this transaction an id and returns it: every id handed out before is lower.
	Transaction(ctx context.Context) (uint64, error)
	// TidyEvents makes the next partitions and drops those that are older than keep.
	TidyEvents(ctx context.Context, keep time.Duration) error
}
