// Package images builds and keeps guest images: a kernel, an initrd with the guest agent, a
// read-only root file system and an empty writable overlay disk. It owns only the image store on
// disk: it starts no virtual machine and knows no runner.
//
// An image is a directory named after its digest, which is the sha256 of its image.json. image.json
// has the sha256 and the size of every other file, the kernel's release and command line, and the
// recipe. A published image never changes; a name is a small file that points at a digest.
//
// # Where the parts come from
//
// The root file system is either a Debian one or the unpacked output of `docker export`. mmdebstrap
// makes the Debian one from the sources of the host's own apt. The kernel is Debian's cloud kernel,
// downloaded and unpacked but never installed on the host. Both are made only when their inputs
// changed: the store caches them beside the images under a key of those inputs. The initrd is a
// newc cpio archive written here: /init is the guest agent, /etc/coppice/modules lists its kernel
// modules, as absolute paths in insmod order.
//
// # Crash safety
//
// Everything is written under a temporary name in the store, flushed, and published by one rename,
// under an flock. A killed build leaves only a temporary directory, which the next build or removal
// deletes. The programs that run as root on a half-made tree (mmdebstrap and the packages' own
// scripts) run in their own mount and process namespaces and die with the process that started
// them. So no mount and no process of a dead build can outlive it.
//
// # Determinism
//
// The same package versions, kernel version, agent and recipe give the same digest: times are
// clamped to the newest file that a package shipped, UUIDs and hash seeds are fixed, logs and
// caches are dropped.
package images
