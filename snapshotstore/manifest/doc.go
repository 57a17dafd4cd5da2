// Package manifest is the map of a checkpoint: which page of which image is in which frame of which object. It is pure: it reads and
// writes bytes and knows no store.
//
// An image is a sparse array of pages. Its map is a radix tree of nodes that are named by the sha256 of their bytes: a leaf maps
// LeafPages pages to slots of frames, an inner node has up to Fanout children, and what is all zeros has no node. Whoever changes
// one page writes a leaf and the path above it anew and shares everything else. A manifest has a header and those nodes that none
// of the manifests has which the header names; so a map is always whole, however deep the checkpoint is in its tree.
//
// docs/SNAPSHOT_FORMAT.md has the format byte by byte.
package manifest
