// Package lazy owns the images of a host that machines use before the images are complete: memory
// bases and root file systems that are still being fetched. The pager serves these images (package
// pager, a process of its own); this package is the runner's side of it.
//
// [Images] is the owner. It records each image on disk before it begins, so that the next runner
// continues with it. It starts the pager, watches it, and offers it every image that is not
// complete. It moves a complete image to its place, where it is a file like any other. When the
// pager ends, the machines that have memory from it end too, and another pager continues with the
// images. A pager of another version keeps what it serves and gets nothing new.
//
// Images says which machines wait for a page that does not come, since when and why. The runner
// decides what happens to them.
//
// [WorkingSets] are the pages that machines use first, by base. They are learned from a machine
// that was observed or rehearsed, and the pager fetches them first.
//
// The package knows no sandboxes and no checkpoints on disk. It gets its configuration in [Config],
// and calls the runner through [Host].
package lazy
