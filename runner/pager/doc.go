// Package pager serves images of checkpoints while they are still being fetched: a machine starts on memory of which nothing is here
// yet, and what it touches is brought first.
//
// The pager is a process of its own, one per runner. It shows each image as a file of a FUSE file system below a directory of root's; a client
// is given descriptors, not paths, so it need not see the mount. A VMM maps such a file privately, as it maps any base; a page that is not here is read from the store when
// the machine touches it, verified, and written to the image's own file, a sparse one that the runner has made. The rest follows in the
// background, the pages that forks of its kind have touched before first. When the image is whole its file is the runner's to use, and
// later machines map that; those that map the pager's go on, and read from the same file.
//
// The pager survives the runner. When the pager dies its files are broken, and so are the machines that map them: the runner ends them.
// What cannot be read because the store is away is waited for, however long: the machine stands still where it touches such a page, and
// goes on when the store is back. What is damaged in the store is never shown: the machine that touches it ends.
package pager
