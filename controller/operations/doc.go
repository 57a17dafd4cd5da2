// Package operations is the engine of operations: durable units of work, each a row with an input, a
// named step and a lease. It owns their admission, their run, their leases, the take-over from
// controllers that are gone, their end, and the requests that wait for it. It also owns the lines in
// which requests wait for room on a runner.
//
// It does not know what an operation does. The caller gives each operation a Work, and the database
// through Store. T is the caller's transaction, which has the methods of Tx. R is the caller's result
// of an operation, with objects in place of their ids.
//
// # The life of an operation
//
// Begin inserts the row in one transaction, together with the rows that its Work needs, and starts the
// Work at once on a context of the engine; the request only waits (Task.Await). Task.Finish or
// Task.Fail writes all results in a second transaction. That transaction names the lease epoch of its
// claim: if another controller has claimed the operation meanwhile, it changes nothing. A controller
// that finds an operation with an expired lease reads its Work from the row and runs it again from its
// step. So whatever a Work does outside of the database can be repeated.
//
// Cancel only marks the row. The engine that works on the operation looks for such marks, ends the
// context of the Work, and then has it take back what it has begun.
package operations
