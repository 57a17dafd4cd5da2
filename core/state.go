package core

import "slices"

// WorkspaceState is where a workspace is in its life. The zero value is not a state.
type WorkspaceState string

// The workspace states (DECISIONS 21).
const (
	WorkspaceCreating      WorkspaceState = "creating"      // being made from an image: its template is prepared or forked
	WorkspaceRestoring     WorkspaceState = "restoring"     // a sandbox is being started from a checkpoint
	WorkspaceQuarantined   WorkspaceState = "quarantined"   // the sandbox runs, cut off and frozen, until it is resealed
	WorkspaceReady         WorkspaceState = "ready"         // resealed and released
	WorkspaceCheckpointing WorkspaceState = "checkpointing" // paused for a capture; it becomes ready again
	WorkspaceSuspended     WorkspaceState = "suspended"     // checkpointed and stopped
	WorkspaceTerminating   WorkspaceState = "terminating"   // its sandbox is being taken down
	WorkspaceTerminated    WorkspaceState = "terminated"    // gone, by request
	WorkspaceFailed        WorkspaceState = "failed"        // never became ready; nothing of it runs
	WorkspaceLost          WorkspaceState = "lost"          // its VM died or its runner vanished; never silently replaced
)

var workspaceTransitions = map[WorkspaceState][]WorkspaceState{
	WorkspaceCreating:      {WorkspaceRestoring, WorkspaceTerminating, WorkspaceFailed, WorkspaceLost},
	WorkspaceRestoring:     {WorkspaceQuarantined, WorkspaceReady, WorkspaceSuspended, WorkspaceTerminating, WorkspaceFailed, WorkspaceLost},
	WorkspaceQuarantined:   {WorkspaceReady, WorkspaceTerminating, WorkspaceFailed, WorkspaceLost},
	WorkspaceReady:         {WorkspaceCheckpointing, WorkspaceRestoring, WorkspaceSuspended, WorkspaceTerminating, WorkspaceLost},
	WorkspaceCheckpointing: {WorkspaceReady, WorkspaceSuspended, WorkspaceTerminating, WorkspaceLost},
	WorkspaceSuspended:     {WorkspaceRestoring, WorkspaceTerminating},
	WorkspaceTerminating:   {WorkspaceTerminated},
	WorkspaceTerminated:    {},
	WorkspaceFailed:        {WorkspaceTerminated},
	WorkspaceLost:          {WorkspaceTerminated},
}

// WorkspaceStates returns every state in the order of a life.
func WorkspaceStates() []WorkspaceState {
	return []WorkspaceState{
		WorkspaceCreating, WorkspaceRestoring, WorkspaceQuarantined, WorkspaceReady, WorkspaceCheckpointing,
		WorkspaceSuspended, WorkspaceTerminating, WorkspaceTerminated, WorkspaceFailed, WorkspaceLost,
	}
}

// CanBecome reports whether the state may change to t in one step.
func (s WorkspaceState) CanBecome(t WorkspaceState) bool {
	return slices.Contains(workspaceTransitions[s], t)
}

// Sources returns the states that may become s in one step, in the order of a life.
func (s WorkspaceState) Sources() []WorkspaceState { return sources(s, WorkspaceStates()) }

// Live reports whether a sandbox of the workspace exists or may exist on a runner.
func (s WorkspaceState) Live() bool {
	switch s {
	case WorkspaceCreating, WorkspaceRestoring, WorkspaceQuarantined, WorkspaceReady, WorkspaceCheckpointing, WorkspaceTerminating:
		return true
	case WorkspaceSuspended, WorkspaceTerminated, WorkspaceFailed, WorkspaceLost:
	}
	return false
}

// Final reports whether nothing but removal follows.
func (s WorkspaceState) Final() bool {
	return s == WorkspaceTerminated || s == WorkspaceFailed || s == WorkspaceLost
}

// CheckpointState is how far a checkpoint has come. The zero value is not a state.
type CheckpointState string

// The checkpoint states (DECISIONS 21).
const (
	CheckpointCapturing CheckpointState = "capturing" // the capture runs; not visible as a node yet
	CheckpointCaptured  CheckpointState = "captured"  // durable on its host, can be forked there
	CheckpointSealed    CheckpointState = "sealed"    // durable in the store, can be forked anywhere
	CheckpointFailed    CheckpointState = "failed"    // the capture did not succeed; nothing of it is kept
	CheckpointDeleted   CheckpointState = "deleted"   // removed by request; the row stays while children name it
)

var checkpointTransitions = map[CheckpointState][]CheckpointState{
	CheckpointCapturing: {CheckpointCaptured, CheckpointFailed},
	CheckpointCaptured:  {CheckpointSealed, CheckpointDeleted},
	CheckpointSealed:    {CheckpointDeleted},
	CheckpointFailed:    {CheckpointDeleted},
	CheckpointDeleted:   {},
}

// CheckpointStates returns every state in the order of a life.
func CheckpointStates() []CheckpointState {
	return []CheckpointState{CheckpointCapturing, CheckpointCaptured, CheckpointSealed, CheckpointFailed, CheckpointDeleted}
}

// CanBecome reports whether the state may change to t in one step.
func (s CheckpointState) CanBecome(t CheckpointState) bool {
	return slices.Contains(checkpointTransitions[s], t)
}

// Sources returns the states that may become s in one step.
func (s CheckpointState) Sources() []CheckpointState { return sources(s, CheckpointStates()) }

// Forkable reports whether sandboxes may be grown from a checkpoint in this state.
func (s CheckpointState) Forkable() bool { return s == CheckpointCaptured || s == CheckpointSealed }

// OperationState is how far an operation has come. The zero value is not a state.
type OperationState string

// The operation states.
const (
	OperationPending   OperationState = "pending"   // accepted, nobody works on it
	OperationRunning   OperationState = "running"   // claimed by a controller under a lease
	OperationSucceeded OperationState = "succeeded" // done; for a fork, at least one child is ready
	OperationFailed    OperationState = "failed"    // ended without its effect; what it had begun was undone
)

var operationTransitions = map[OperationState][]OperationState{
	OperationPending:   {OperationRunning, OperationFailed},
	OperationRunning:   {OperationSucceeded, OperationFailed, OperationPending},
	OperationSucceeded: {},
	OperationFailed:    {},
}

// OperationStates returns every state in the order of a life.
func OperationStates() []OperationState {
	return []OperationState{OperationPending, OperationRunning, OperationSucceeded, OperationFailed}
}

// CanBecome reports whether the state may change to t in one step.
func (s OperationState) CanBecome(t OperationState) bool {
	return slices.Contains(operationTransitions[s], t)
}

// Sources returns the states that may become s in one step.
func (s OperationState) Sources() []OperationState { return sources(s, OperationStates()) }

// Done reports whether the operation has ended.
func (s OperationState) Done() bool { return s == OperationSucceeded || s == OperationFailed }

func sources[S interface {
	comparable
	CanBecome(S) bool
}](to S, all []S) []S {
	var out []S
	for _, s := range all {
		if s.CanBecome(to) {
			out = append(out, s)
		}
	}
	return out
}
