package model

import (
	"time"

	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/core"
)

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

// IdlePolicy is the idle policy of a workspace.
type IdlePolicy struct {
	IdleAfter  time.Duration // 0: nothing
	OnIdle     IdleAction    // empty when IdleAfter is 0
	AutoResume bool          // a suspended workspace is resumed when somebody uses it
	OnTTL      IdleAction    // what becomes of it at the end of its time; empty is IdleTerminate
}

// Workspace is the durable thing a user works in, with the sandbox that it has now.
type Workspace struct {
	ID         core.WorkspaceID
	ProjectID  core.ProjectID
	Name       string
	State      core.WorkspaceState
	Unknown    bool  // its runner has been silent for a while
	Stall      Stall // the zero value while it does not stand still
	Epoch      int64 // grows with every restore in place
	Version    int64 // of labels and expiry
	Image      ImageRef
	Resources  core.Resources
	Egress     core.EgressPolicy
	Rules      grants.Rules
	Env        map[string]string
	Labels     map[string]string
	IdlePolicy IdlePolicy
	Parent     core.CheckpointID // made from
	Head       core.CheckpointID // last forked from, restored to or captured as
	Sandbox    Sandbox           // the zero value when it has none that lives
	Failure    *Failure
	CreatedAt  time.Time
	ReadyAt    time.Time
	ExpiresAt  time.Time
	EndedAt    time.Time
}

// EndedWorkspace ends a workspace. To is terminated, failed or lost.
type EndedWorkspace struct {
	ID      core.WorkspaceID
	To      core.WorkspaceState
	Failure *Failure
	// Sandbox is the sandbox for which the end was decided. A workspace that has another sandbox by
	// now goes on. If Sandbox is empty, the workspace ends in any sandbox.
	Sandbox core.SandboxID
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

	// Tree is the id of the tree. Sandboxes of a tree may have memory in common: they all descend from one workspace that was made from an
	// image. Within a tree, and on a runner, no two living sandboxes have the same address.
	Tree string
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
	Listen      string // ip:port on the runner's host, as the runner has said; empty until it has, and for a preview
	Visibility  Visibility
	KeyID       core.KeyID // that a preview was opened with; empty if that was no request
	ExpiresAt   *time.Time // of a preview; nil: it ends with its workspace
	CreatedAt   time.Time
	Closed      bool // when it was opened, nobody in the guest listened on GuestPort; not kept
}

// Visibility says who may use a preview. It is empty for a forwarded port.
type Visibility string

// The visibilities of previews.
const (
	VisibilityPrivate Visibility = "private" // who has an API key of the project
	VisibilitySigned  Visibility = "signed"  // who has the URL with its token
	VisibilityPublic  Visibility = "public"  // everybody
)

// ForGrants returns the fields of a workspace that package grants needs.
func (w Workspace) ForGrants() grants.Workspace {
	g := grants.Workspace{
		ID: w.ID, ProjectID: w.ProjectID, Parent: w.Parent, State: w.State, Egress: w.Egress, Rules: w.Rules,
		Sandbox: grants.Sandbox{
			ID: w.Sandbox.ID, RunnerID: w.Sandbox.RunnerID, Endpoint: w.Sandbox.Endpoint, EgressKey: w.Sandbox.EgressKey, EgressURL: w.Sandbox.EgressURL,
		},
	}
	if w.State.Final() {
		g.Ended = w.NotReady()
	}
	return g
}

// RulesPending reports whether a workspace runs on a host that is not known to have its present rules.
func (w Workspace) RulesPending() bool { return w.ForGrants().Pending() }

// NotReady refuses a request that does not fit the state of a workspace, and says what to do next.
func (w Workspace) NotReady() error {
	hint := "wait until it is ready"
	if w.State == core.WorkspaceSuspended {
		hint = "resume it"
	}
	if w.State.Final() || w.State == core.WorkspaceTerminating {
		hint = "create or fork another"
		if w.State == core.WorkspaceLost {
			hint = "fork its last checkpoint"
			if w.Failure != nil && w.Failure.RecoverFrom != "" {
				hint = "restore its last checkpoint that is left, " + string(w.Failure.RecoverFrom)
			}
		}
	}
	return core.Errorf(core.FailedPrecondition, core.CodeWorkspaceNotReady, "workspace %s is %s; %s", w.ID, w.State, hint)
}

// Reachable returns nil if the guest of a workspace can get requests. During a capture the agent itself delays requests.
func (w Workspace) Reachable() error {
	if w.State != core.WorkspaceReady && w.State != core.WorkspaceCheckpointing {
		return w.NotReady()
	}
	return nil
}

// Asleep reports whether a workspace with auto-resume may have to be resumed.
func (w Workspace) Asleep() bool {
	return w.IdlePolicy.AutoResume && (w.State == core.WorkspaceSuspended || w.State == core.WorkspaceRestoring || w.State == core.WorkspaceCheckpointing)
}

// WorkspaceFilter selects workspaces; zero fields do not filter. Newest first.
type WorkspaceFilter struct {
	Page
	Name     string
	IDSuffix string
	States   []core.WorkspaceState
	Labels   map[string]*string // nil: the key alone
	Head     core.CheckpointID
	Parent   core.CheckpointID
}

// ReadyWorkspace moves a workspace to ready in the sandbox that it has waited for.
type ReadyWorkspace struct {
	ID      core.WorkspaceID
	Epoch   int64
	Sandbox core.SandboxID
	Given   grants.Given // what its runner was told
}
