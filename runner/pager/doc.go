// Package pager serves images of checkpoints while they are still being fetched. A machine starts on memory that has
// not arrived yet, and the pages that it touches are fetched first.
//
// The pager is a separate process, one per runner. It shows each image as a file of a FUSE file system below a
// directory that root owns. A client gets descriptors, not paths, so it does not have to see the mount. A VMM maps such
// a file privately, as it maps any base. When the machine touches a missing page, the pager reads it from the store,
// verifies it, and writes it to the image's own file, a sparse one that the runner has made. It fetches the rest in the
// background, beginning with the pages that earlier forks have touched. When the image is complete, the runner takes
// its file, and later machines map that file. Machines that map the pager's file go on, and read from the same file.
//
// The pager survives the runner. When the pager dies, its files are broken, and so are the machines that map them: the
// runner ends them. While the store is unreachable, a machine stands still where it touches a missing page, however
// long that takes, and goes on when the store is back. Damaged data in the store is never shown: a machine that touches
// it is ended.
package pager
