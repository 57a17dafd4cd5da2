// Package build makes guest images and publishes them in a store. It owns the recipe of an image: what
// is installed, what is removed, how the file systems are made. It keeps nothing itself: cached parts
// are the store's.
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
// The programs that run as root on a half-made tree (mmdebstrap and the packages' own scripts) run in
// their own mount and process namespaces and die with the process that started them. So no mount and
// no process of a dead build can outlive it.
//
// # Determinism
//
// The same package versions, kernel version, agent and recipe give the same digest: times are
// clamped to the newest file that a package shipped, UUIDs and hash seeds are fixed, logs and
// caches are dropped.
package build
