// Package manifest is the map of a checkpoint: it says in which frame and object each page of an image
// is. It is pure: it reads and writes bytes and knows no store.
//
// An image is a sparse array of pages. Its map is a radix tree. The sha256 of a node's bytes is the
// node's name. A leaf maps LeafPages pages to slots of frames, an inner node has up to Fanout
// children, and a range of zeros has no node. A writer that changes one page writes a new leaf and
// a new path above it, and shares everything else. A manifest has a header and the nodes that the
// manifests in its header do not have. So a map is always complete, however deep the checkpoint is
// in its tree.
//
// docs/SNAPSHOT_FORMAT.md has the format byte by byte.
package manifest
