// Package memory is the memory engine. It finds what a virtual machine has written since its base,
// copies it out while the machine is paused, and writes it into another machine before that one
// runs.
//
// A machine's RAM is a base, one immutable file, mapped MAP_PRIVATE. A page that the guest only
// read is the base's own page in the page cache, shared with every other machine on that base. A
// page that it wrote is private anonymous memory of the VMM. The kernel knows the difference, so no
// VMM takes part in dirty tracking: Scan asks the kernel through ioctl(PAGEMAP_SCAN), or reads
// /proc/PID/pagemap if the kernel is older than 6.7. A private page that was swapped out counts
// too.
//
// The result is the delta: all private pages, cumulative since the base, at any depth in the
// checkpoint DAG. Pages that are injected into a child become private there. So the child's own
// delta has them again, and no generation can be skipped or lost. When a delta has become too large
// to copy, base and delta become a new base (BaseStore.Rebase).
//
// The package owns the local file formats of deltas and bases. It knows nothing of checkpoints,
// sandboxes or VMMs.
package memory
