package controller

import (
	"encoding/json"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
)

// SystemProject owns what the operator publishes to all projects: templates, images, runners.
const SystemProject = core.SystemProject

// Scope says for which project a transaction works. The database enforces it: the transaction does not see rows of other projects.
type Scope struct{ name string }

// InProject is the scope of one tenant.
func InProject(id core.ProjectID) Scope { return Scope{string(id)} }

// System is the scope of the controller's own work, which sees every project.
func System() Scope { return Scope{"system"} }

// String gives the value of the database setting that carries the scope.
func (s Scope) String() string { return s.name }

// Project is a tenant.
type Project struct {
	ID        core.ProjectID
	Name      string
	Quotas    Quotas
	CreatedAt time.Time

	Encryption Encryption // of data that is stored from now on
	KeyVersion int64      // of its newest key; 0: it has none
}

// Key is an API key. The secret itself is kept nowhere.
type Key struct {
	ID         core.KeyID
	ProjectID  core.ProjectID
	Name       string
	Prefix     string
	Hash       [32]byte // SHA-256 of the secret
	Scopes     []core.KeyScope
	Parent     core.KeyID // that made it
	CreatedAt  time.Time
	LastUsedAt time.Time // to within seconds; zero: never
	ExpiresAt  time.Time // zero: never
	RevokedAt  time.Time // zero: valid
}

// ImageRef says which image something was made from.
type ImageRef struct {
	Name   string
	Digest core.Digest
}

// Image is a guest image that at least one runner holds.
type Image struct {
	ID        core.ImageID
	Name      string // one of its names; empty if it no longer has one
	Digest    core.Digest
	SizeBytes int64
	BuiltAt   time.Time
	Runners   []core.RunnerID
}

// Failure says why something failed or was lost, in words that its owner may see.
type Failure struct {
	Code        core.Code
	Message     string
	RecoverFrom core.CheckpointID // of a lost workspace: the newest of its checkpoints that can be restored
}

// Stall says why a workspace's machine stands still at present.
type Stall struct {
	Since   time.Time
	Code    core.Code
	Message string
}

// IdleAction is what the controller does with an idle workspace.
type IdleAction string

// The idle actions.
const (
	IdleSuspend   IdleAction = "suspend"
	IdleTerminate IdleAction = "terminate"
)

// Rest is the idle policy of a workspace.
type Rest struct {
	IdleAfter  time.Duration // 0: nothing
	OnIdle     IdleAction    // empty when IdleAfter is 0
	AutoResume bool          // a suspended workspace is resumed when somebody uses it
}

// Workspace is the durable thing a user works in, with the sandbox that it has now.
type Workspace struct {
	ID        core.WorkspaceID
	ProjectID core.ProjectID
	Name      string
	State     core.WorkspaceState
	Unknown   bool  // its runner has been silent for a while
	Stall     Stall // the zero value while it does not stand still
	Epoch     int64 // grows with every restore in place
	Version   int64 // of labels and expiry
	Image     ImageRef
	Resources core.Resources
	Egress    core.EgressPolicy
	Rules     grants.Rules
	Env       map[string]string
	Labels    map[string]string
	Rest      Rest
	Parent    core.CheckpointID // made from
	Head      core.CheckpointID // last forked from, restored to or captured as
	Sandbox   Sandbox           // the zero value when it has none that lives
	Failure   *Failure
	CreatedAt time.Time
	ReadyAt   time.Time
	ExpiresAt time.Time
	EndedAt   time.Time
}

// Sandbox is one VM instance: its place and its identity.
type Sandbox struct {
	ID          core.SandboxID
	ProjectID   core.ProjectID
	WorkspaceID core.WorkspaceID
	Epoch       int64
	RunnerID    core.RunnerID
	Endpoint    string // of the runner
	Resources   core.Resources
	Identity    core.Identity
	EgressKey   []byte // of the egress process of its host
	EgressURL   string // of that, as its guest reaches it

	// Tree is the id of the tree. Sandboxes of a tree may have memory in common: they all grew from one workspace that was made from an
	// image. Within a tree, and on a runner, no two living sandboxes have the same address.
	Tree string
}

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
	Tree             string         // of the sandboxes that grow from it; set by Tx.Checkpoint and for its insertion only
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

	Sources []runnerapi.Stored // of one that is to be grown: itself and its ancestors, as far as they are sealed
	Peers   []runnerapi.Peer   // likewise: runners that may have what is there

	Egress core.EgressPolicy // of the workspace that it was taken of, for its forks
	Allow  []string          // likewise
	// Granted says that the workspace has grants.
	Granted bool
	Env     map[string]string // likewise
}

// Imported is what a file says of the exported checkpoint. Nothing of it was checked.
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

// OperationKind names what an operation does.
type OperationKind string

// The kinds of operations.
const (
	OpCreateWorkspace    OperationKind = "create_workspace"
	OpCreateTemplate     OperationKind = "create_template" // of the system project; creators wait for it
	OpCreateCheckpoint   OperationKind = "create_checkpoint"
	OpForkCheckpoint     OperationKind = "fork_checkpoint"
	OpForkWorkspace      OperationKind = "fork_workspace"
	OpRestoreWorkspace   OperationKind = "restore_workspace"
	OpRestoreCheckpoint  OperationKind = "restore_checkpoint"
	OpTerminateWorkspace OperationKind = "terminate_workspace"
	OpSuspendWorkspace   OperationKind = "suspend_workspace"
	OpResumeWorkspace    OperationKind = "resume_workspace"
	OpPruneCheckpoints   OperationKind = "prune_checkpoints"
)

// Operation is a durable, resumable unit of work.
type Operation struct {
	ID           core.OperationID
	ProjectID    core.ProjectID
	Kind         OperationKind
	State        core.OperationState
	Step         string // the named step to resume at; empty is the first
	Input        json.RawMessage
	Result       json.RawMessage // an Outcome, when it succeeded
	Problem      *core.Error     // when it failed
	Timings      []core.Timing
	WorkspaceID  core.WorkspaceID
	CheckpointID core.CheckpointID
	RequestID    string
	Origin       Origin // who asked for it; set by its insertion
	LeaseOwner   string
	LeaseEpoch   int64
	CreatedAt    time.Time
	StartedAt    time.Time
	EndedAt      time.Time
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

// Runner is a host's agent as the controller knows it.
type Runner struct {
	Info           runnerapi.Info
	Endpoint       string
	DataOwnCert    bool   // that shows a certificate of the cluster's authority
	DataURL        string // where users reach its data plane; empty: through the controller
	Fresh          bool   // its lease has not run out
	Draining       bool
	Fenced         bool // given up: silent for so long that it has killed its sandboxes itself
	LeaseEpoch     int64
	LeaseExpiresAt time.Time
	HeartbeatAt    time.Time
	Used           runnerapi.Capacity // according to the rows, not to its own report
	ImagesSum      string             // of the list of images that was recorded last

	ask placement.Request // for which it was chosen
}

// Session maps the public id of an exec session to the guest's. Its state lives in the guest.
type Session struct {
	ID          core.SessionID
	ProjectID   core.ProjectID
	WorkspaceID core.WorkspaceID
	SandboxID   core.SandboxID
	GuestID     core.SessionID
	CreatedAt   time.Time
}

// AttachToken lets its bearer attach to one session once. Only its hash is stored.
type AttachToken struct {
	Hash      [32]byte
	ProjectID core.ProjectID
	KeyID     core.KeyID // that asked for it
	SessionID core.SessionID
	SandboxID core.SandboxID
	ExpiresAt time.Time
}

// Port is a forwarded port.
type Port struct {
	ID          core.PortID
	ProjectID   core.ProjectID
	WorkspaceID core.WorkspaceID
	GuestPort   int
	Listen      string // ip:port on the runner's host
	CreatedAt   time.Time
}
