// Package runner owns the sandboxes of one host: it boots an image once and keeps it as a template checkpoint, grows forks from
// checkpoints, reseals and releases them, captures running sandboxes, and takes everything down again whole.
//
// # Who owns what
//
// A shell is a VMM process that waits on a base, with its namespace, its user id and its overlay file: everything of a machine
// but its state. A sandbox is a shell that was given the state of a checkpoint and an identity. Shells of bases that were
// forked lately are kept warm, so that most of a fork's cost is paid before it is asked for.
//
// A checkpoint is a directory that is written under another name and published by rename: device state, the memory delta, the
// overlay, and a record that names the base. It is never changed, except that a rebase replaces base and delta by another base
// with the same bytes.
//
// # What survives what
//
// Checkpoints and bases are durable. A sandbox lives as long as its VMM. What a runner process was in the middle of when it
// died is found by its successor in the journal, one file per shell, and taken down.
//
// The runner knows nothing of users, projects, names or search: those are the controller's. It is told ids and identities, and
// every call is idempotent by the id it is given.
package runner
