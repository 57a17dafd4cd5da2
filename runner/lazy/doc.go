// Package lazy owns the images of a host that are not complete: memory bases and root file systems
// that machines already use while they are still being fetched. The pager serves these images; it is
// a process of its own (package pager). This package is the runner's side of it.
//
// [Images] is the owner. It records each image on disk before it begins to fetch it, so that the
// next runner can continue. It starts the pager, watches it, and offers it every image that is not
// complete. It moves a complete image to its place, where it is a file like any other. When the
// pager ends, the machines that have memory from it end too, and another pager continues with the
// images. A pager of another version keeps the images that it serves and gets no new ones.
//
// Images reports which machines wait for a missing page, since when and why. The runner decides what
// happens to these machines.
//
// [WorkingSets] has, for each base, the pages that machines use first. The runner learns them from a
// machine that it observed or rehearsed. The pager fetches them first.
//
// The package knows no sandboxes and no checkpoints on disk. It gets its configuration in [Config],
// and calls the runner through [Host].
package lazy
