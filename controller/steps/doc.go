// Package steps carries out steps: operations of the kind step_checkpoint. A step has up to MaxActions
// actions. For each, it forks a workspace from a checkpoint, writes files, runs a command, and keeps a
// checkpoint, the workspace, or nothing.
//
// It makes nothing itself. Each fork, checkpoint and termination is an operation of its own, a command
// is a session, and all of them are begun by the use cases that serve separate requests (Uses). So
// they respect the same quotas, lines and leases.
//
// # Crashes
//
// Each action has a row with its phase. The transaction that begins an operation for an action also
// moves the action to its next phase and notes the operation's objects (Tx.MoveStepAction). This write
// is fenced by the lease epoch of the step. So at any moment the rows name every workspace that the
// step has made, and a controller that has lost the lease makes no other. A controller that claims the
// step reads the rows and continues each action in its phase (Stepper.Run). A command is started once:
// its session is bound to an idempotency key that is made from the step and the index of the action.
package steps
