package core

import "slices"

// WorkspaceState is the state of a workspace. The zero value is not a state.
type WorkspaceState string

// The workspace states (DECISIONS 21).
const (
	WorkspaceCreating      WorkspaceState = "creating"      // it is made from an image: the template is prepared or forked
	WorkspaceRestoring     WorkspaceState = "restoring"     // a sandbox starts from a checkpoint
	WorkspaceQuarantined   WorkspaceState = "quarantined"   // the sandbox runs without network and with a frozen workload until it is resealed
	WorkspaceReady         WorkspaceState = "ready"         // the sandbox is resealed and released
	WorkspaceCheckpointing WorkspaceState = "checkpointing" // the sandbox is paused for a capture; it becomes ready again
	WorkspaceSuspended     WorkspaceState = "suspended"     // the sandbox was checkpointed and stopped
	WorkspaceTerminating   WorkspaceState = "terminating"   // the sandbox is taken down
	WorkspaceTerminated    WorkspaceState = "terminated"    // removed by request
	WorkspaceFailed        WorkspaceState = "failed"        // it never became ready; nothing of it runs
	WorkspaceLost          WorkspaceState = "lost"          // its VM died or its runner vanished; it is never silently replaced
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

// Final reports whether only removal can follow.
func (s WorkspaceState) Final() bool {
	return s == WorkspaceTerminated || s == WorkspaceFailed || s == WorkspaceLost
}

// CheckpointState is the state of a checkpoint. The zero value is not a state.
type CheckpointState string

// The checkpoint states (DECISIONS 21).
const (
	CheckpointCapturing CheckpointState = "capturing" // the capture runs; the node is not visible yet
	CheckpointCaptured  CheckpointState = "captured"  // it is durable on its host and can be forked there
	CheckpointSealed    CheckpointState = "sealed"    // it is durable in the store and can be forked on any runner of its class
	CheckpointFailed    CheckpointState = "failed"    // the capture failed; nothing of it is kept
	CheckpointDeleted   CheckpointState = "deleted"   // it was removed by request; the row stays while children name it
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

// Forkable reports whether a checkpoint in this state can be forked.
func (s CheckpointState) Forkable() bool { return s == CheckpointCaptured || s == CheckpointSealed }

// OperationState is the state of an operation. The zero value is not a state.
type OperationState string

// The operation states.
const (
	OperationPending   OperationState = "pending"   // it is accepted; no controller works on it
	OperationRunning   OperationState = "running"   // a controller has claimed it under a lease
	OperationSucceeded OperationState = "succeeded" // it is done; for a fork, at least one child is ready
	OperationFailed    OperationState = "failed"    // it ended without effect; what it had begun was undone
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
