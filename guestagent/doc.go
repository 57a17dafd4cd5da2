// Package guestagent is the agent inside a sandbox's VM. It speaks guestapi over the channel that the
// VMM provides: it accepts hosts, routes their requests, and keeps the state that says what may happen
// now (released, frozen, quarantined), also for the agent that is started after it.
//
// The work itself is done by the packages below: sessions runs programs, files and watch serve files,
// workload has the cgroup and the namespaces of the user's processes, reseal gives a clone its own
// identity, procfs and loopback list and reach what runs.
//
// # Where things run
//
// The agent is a child of the guest's PID 1 (package boot), outside the workload. The workload
// lives in the cgroup /sys/fs/cgroup/workload and in its own pid, mount and cgroup namespaces.
// Their PID 1 is a mode of the same binary that only reaps. A thread of the agent that has joined
// these namespaces starts a session's process, and the process is born in the cgroup
// (CLONE_INTO_CGROUP). So no step of it ever runs outside.
//
// # What happens while the VM is cloned
//
// The cgroup freezer does not freeze the agent itself: it stops with the VM and goes on in every
// clone, with the memory that it had. So it holds nothing that must differ between clones (no keys,
// no random state of its own). Each connection has a context that ends before the next connection
// is answered: a clone gives up the requests of the parent's host.
//
// An idle agent does nothing: no timers, no garbage collection (see idle.go). Pages that it does
// not touch stay shared with the base.
package guestagent
