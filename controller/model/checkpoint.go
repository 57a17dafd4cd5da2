package model

import (
	"encoding/json"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/core"
)

// CheckpointKind distinguishes the roots of trees from checkpoints that users made.
type CheckpointKind string

// The kinds of checkpoints.
const (
	KindTemplate CheckpointKind = "template" // an image, booted once
	KindUser     CheckpointKind = "user"
)

// Checkpoint is a node of the tree.
type Checkpoint struct {
	ID               core.CheckpointID
	ProjectID        core.ProjectID
	Kind             CheckpointKind
	State            core.CheckpointState
	Parent           core.CheckpointID
	ParentProject    core.ProjectID
	Root             core.CheckpointID
	Depth            int // generations below Root
	WorkspaceID      core.WorkspaceID
	WorkspaceEpoch   int64
	SandboxID        core.SandboxID // the captured sandbox; set for the insertion only
	Tree             string         // of the sandboxes that are forked from it; set by Tx.Checkpoint and for its insertion only
	Address          string         // the address of the machine when it was captured; set likewise
	Name             string
	Labels           map[string]string
	Annotations      map[string]json.RawMessage
	Pinned           bool  // it cannot be deleted
	Version          int64 // of name, labels, annotations and pin
	Image            ImageRef
	Resources        core.Resources
	RunnerID         core.RunnerID
	Endpoint         string // of the runner that holds it
	Class            *runnerapi.RunnerClass
	Base             core.BaseID
	DeltaBytes       int64
	DeviceStateBytes int64
	DiskBytes        int64
	PauseMS          float64
	Timings          []core.Timing
	ParentReseal     []core.ResealStep
	StaleProcesses   []core.StaleProcess
	ChildrenCount    int // direct children that can be seen and are not deleted
	OperationID      core.OperationID
	Failure          *Failure
	CreatedAt        time.Time
	CapturedAt       time.Time
	SealedAt         time.Time
	EndedAt          time.Time

	Stored      *runnerapi.Stored // where it is in the store, once it has been sealed
	StoredBytes int64             // that were written for it
	Seal        *Seal             // the progress of its upload; nil if it is in the store, or if there is no upload

	Imported *Imported // of one that came as a file

	Sources []runnerapi.Stored // of one that is to be forked: itself and its ancestors, as far as they are sealed
	Peers   []runnerapi.Peer   // likewise: runners that may have what is there

	Egress core.EgressPolicy // of the workspace that it was taken of, for its forks
	Allow  []string          // likewise
	// Published says that it was made an image, so its forks may reach what a workspace of the project may.
	Published bool
	// Granted says that the workspace has grants.
	Granted bool
	Env     map[string]string // likewise
}

// Imported is what a file says of the exported checkpoint. It is unchecked.
type Imported struct {
	CheckpointID core.CheckpointID `json:"checkpoint_id"`
	Image        core.Digest       `json:"image"`
	CapturedAt   time.Time         `json:"captured_at"`
}

// Ancestor is a checkpoint on the path to a root. A path may have thousands of checkpoints, so it has only the fields that readers of a path
// need.
type Ancestor struct {
	ID          core.CheckpointID
	Kind        CheckpointKind
	State       core.CheckpointState
	Parent      core.CheckpointID
	Depth       int // generations below the root
	WorkspaceID core.WorkspaceID
	Name        string
	Annotations json.RawMessage // an object
	Pinned      bool
	CreatedAt   time.Time
	CapturedAt  time.Time
}

// TreeNode is a checkpoint below another, with the living workspaces whose head it is.
type TreeNode struct {
	Checkpoint Checkpoint
	Depth      int // generations below the asked checkpoint
	Effects    int // flows between its parent and it that may have changed something outside
	Workspaces []Workspace
}

// ResealRecord is a reseal report with the ids of the objects that it concerns.
type ResealRecord struct {
	ProjectID    core.ProjectID
	WorkspaceID  core.WorkspaceID
	SandboxID    core.SandboxID
	Epoch        int64
	CheckpointID core.CheckpointID
	OperationID  core.OperationID
	Report       core.ResealReport
	CreatedAt    time.Time

	// Attestation is the signed and countersigned report of its reseal; set for its insertion only.
	Attestation []byte
	RunnerID    core.RunnerID // that signed it; likewise
}

// Seal is what users see of the upload of a captured checkpoint to the store.
type Seal struct {
	State   SealState
	Attempt int64    // 0 while queued
	Problem *Failure // of the last attempt that failed, until one succeeds
}

// SealState is the state of that upload.
type SealState string

// The states of a seal.
const (
	SealQueued    SealState = "queued" // its runner has not begun
	SealUploading SealState = "uploading"
	SealFailed    SealState = "failed" // the last attempt; another follows
)

// Origin has the rules that bound the forks of a checkpoint: the rules of its workspace. It is nil for a checkpoint from an image or a
// file, and for one that is an image.
func (cp Checkpoint) Origin() *grants.WorkspaceRules {
	if cp.WorkspaceID == "" || cp.Published {
		return nil
	}
	return &grants.WorkspaceRules{ID: cp.WorkspaceID, Egress: cp.Egress, Allow: cp.Allow}
}

// Expected returns the fields that a runner requires of the manifest of a checkpoint.
func (cp Checkpoint) Expected() *runnerapi.Expected {
	out := &runnerapi.Expected{ProjectID: cp.ProjectID, Parent: cp.Parent, Image: cp.Image.Digest, Resources: cp.Resources}
	if cp.Class != nil {
		out.Class = *cp.Class
	}
	return out
}

// StoredObject is the row of an object in the store.
type StoredObject struct {
	Key       string
	Bytes     int64
	Condemned bool
}

// ErrNoStore says that there is no store for checkpoints.
var ErrNoStore error = core.Errorf(core.Invalid, core.CodeUnsupported, "no store is configured, so nothing is sealed; start coppice dev, or all controllers and runners, with --store dir:/path or s3://bucket: what was captured before is sealed, too")
