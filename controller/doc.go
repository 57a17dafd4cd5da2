// Package controller holds the use cases of the control plane: create, exec, checkpoint, fork, restore, terminate, the
// checkpoint tree, and what repairs them after a crash. It owns the state of workspaces, checkpoints and operations; it
// knows no SQL (controller/postgres), no HTTP (controller/httpapi) and no VMM (runners are reached through Runners).
//
// # Operations
//
// Every change that takes a runner is an operation: a row with its input, a named step and a lease. A use case inserts it
// in one transaction together with the rows that it makes, in their first state, and runs it at once on a context of the
// server; the request only waits. A second transaction writes all results. In between nothing is written, and everything
// that is asked of a runner is idempotent by sandbox or checkpoint id, so that whoever finds an operation whose lease ran
// out can run it again from its step. A finishing transaction names the lease epoch that it was claimed under: when another
// controller has claimed the operation meanwhile, it changes nothing.
//
// Rows exist before a runner is called. A sandbox or checkpoint that a runner reports without a living row is therefore
// garbage, and its heartbeat is told to drop it; a ready workspace whose sandbox is gone is LOST and says so. Neither
// is ever replaced silently.
package controller
