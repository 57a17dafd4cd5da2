// Package images builds and keeps guest images: a kernel, an initrd that holds the guest agent, a read-only root file
// system and an empty writable overlay disk. It owns the image store on disk and nothing else: it starts no virtual
// machine and knows no runner.
//
// An image is a directory named after its digest, which is the sha256 of its image.json; image.json names the sha256
// and the size of every other file, the kernel's release and command line, and the recipe. An image is never changed
// after it was published; a name is a small file that points at a digest.
//
// # Where the parts come from
//
// The root file system is either a Debian one, made by mmdebstrap from the sources that the host's own apt is
// configured with, or the unpacked output of `docker export`. The kernel is Debian's cloud kernel, downloaded and
// unpacked but never installed on the host. Both are made only when their inputs changed: they are cached beside the
// images under a key of those inputs. The initrd is a newc cpio archive written here: /init is the guest agent,
// /etc/coppice/modules lists the kernel modules it holds, as absolute paths in insmod order.
//
// # Crash safety
//
// Everything is written under a temporary name in the store, flushed, and published by one rename, under an flock.
// A build that is killed leaves a temporary directory and nothing else; the next build or removal deletes it. The
// programs that run as root on a half-made tree (mmdebstrap and the packages' own scripts) run in mount and process
// namespaces of their own and are killed with the process that started them, so that neither a mount nor a process of
// a dead build can outlive it.
//
// # Determinism
//
// The same package versions, kernel version, agent and recipe give the same digest: times are clamped to the newest
// file that a package shipped, UUIDs and hash seeds are fixed, logs and caches are dropped.
package images
