// Package controller has the use cases of the control plane: create, exec, checkpoint, fork,
// restore, terminate, and the recovery after a crash. It owns the state of workspaces, checkpoints
// and operations. It knows no SQL (controller/postgres), no HTTP (controller/httpapi) and no VMM (it
// reaches runners through Runners).
//
// Packages below this one own parts of the work, such as projects and their keys, sessions, or uploads
// to the store. parts.go puts them together.
//
// # Operations
//
// Each kind of operation is one type with its input, its work and what a failure takes back: kinds.go
// lists them. Package operations runs them.
//
// Every change that needs a runner is an operation: a row with its input, a named step and a lease.
// A use case inserts the operation in one transaction, together with the new rows in their first
// state. It runs the operation at once on a context of the server; the request only waits. A second
// transaction writes all results. In between nothing is written. Every call of a runner is
// idempotent by sandbox or checkpoint id. So any controller that finds an operation with an expired
// lease can run it again from its step. A finishing transaction names the lease epoch of its claim:
// if another controller has claimed the operation meanwhile, the transaction changes nothing.
//
// Rows exist before a runner is called. So a sandbox or checkpoint that a runner reports without a
// living row is garbage, and the answer to the heartbeat tells the runner to drop it. A ready
// workspace whose sandbox is gone is LOST and says so. Neither is ever silently replaced.
package controller
