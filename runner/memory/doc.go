// Package memory is the memory engine: it finds what a virtual machine has written since its base, copies it out while
// the machine is paused, and writes it into another machine before that one runs.
//
// A machine's RAM is a base, one immutable file, mapped MAP_PRIVATE. A page that the guest only read is the base's own
// page in the page cache, shared with every other machine on that base; a page it wrote is private anonymous memory of the
// VMM. The kernel knows which is which, so no VMM takes part in dirty tracking: Scan asks the kernel through
// ioctl(PAGEMAP_SCAN), or reads /proc/PID/pagemap where the kernel is older than 6.7. A private page that was swapped out
// counts too.
//
// What is found is the delta: all private pages, cumulative since the base, whatever the depth in the checkpoint DAG. Pages
// that are injected into a child become private there, so the child's own delta holds them again and no generation can
// be skipped or lost. When a delta has grown too large to copy around, base and delta become a new base (BaseStore.Rebase).
//
// The package owns the local file formats of deltas and bases. It knows nothing of checkpoints, sandboxes or VMMs.
package memory
