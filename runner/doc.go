// Package runner owns the sandboxes of one host. It boots an image once and keeps it as a template
// checkpoint, forks checkpoints, reseals and releases the forks, captures running sandboxes, and
// takes everything down completely.
//
// # Who owns what
//
// A shell is a VMM process that waits on a base, with its namespace, its user id and its overlay
// file: a complete machine except for its state. A sandbox is a shell that was given the state of a
// checkpoint and an identity. Shells of recently forked bases are kept warm, so that most of a
// fork's cost is paid before the request.
//
// A checkpoint is a directory with device state, the memory delta, the overlay, and a record that
// names the base. It is written under another name and published by rename. It never changes, with
// one exception: a rebase replaces base and delta by another base with the same bytes.
//
// # Parts
//
// What has one subject is a package below this one. parts.go shows what each of them gets: configuration, and callbacks where the runner decides.
// This package keeps the story of a sandbox: a shell is made, restored, resealed and released, captured and ended. Each of these is a list of
// named steps (step.go).
//
// # What survives what
//
// Checkpoints and bases are durable. A sandbox lives as long as its VMM. When a runner process
// dies, its successor finds unfinished work in the journal, one file per shell, and takes it down.
//
// The runner knows nothing of users, projects, names or search: the controller does. The runner
// gets ids and identities, and every call is idempotent by the id that it has.
package runner
