// Package guestagent is the program inside a sandbox's VM: it runs the user's processes and keeps their output, moves files,
// freezes the workload for a capture, and makes a clone another machine (the reseal). It speaks guestapi over the channel
// that the VMM provides, and owns nothing else in the guest.
//
// # Where things run
//
// The agent is a child of the guest's PID 1 (package boot), outside the workload. The workload lives in the cgroup
// /sys/fs/cgroup/workload and in pid, mount and cgroup namespaces of its own, whose PID 1 is a mode of the same binary that
// only reaps. A session's process is started by a thread of the agent that has joined these namespaces, and is born in
// the cgroup (CLONE_INTO_CGROUP), so that no step of it ever runs outside.
//
// # What happens while the VM is cloned
//
// The agent itself is not frozen by the cgroup freezer: it is stopped with the VM and goes on in every clone, with the
// memory it had. So it holds nothing that must differ between clones (no keys, no random state of its own), and each
// connection has a context that ends before the next connection is answered: what the parent's host had asked for is
// given up in the clone.
//
// An idle agent does nothing: no timers, no garbage collection (see idle.go). Pages that it does not touch stay shared with
// the base.
package guestagent
