// Package snapshotstore keeps checkpoints in a blob store: it writes what a checkpoint has that an earlier one has not, and reads any
// page of any checkpoint back, verified.
//
// A checkpoint is a few images: memory, disk, device state. Their pages are in frames, zstd-compressed, each with a sha256; frames are
// in packs, objects that are written once; a manifest maps every page of every image to its frame (package manifest). Packs are
// durable before the manifest that names them, and the manifest before the row that has its digest. Reading goes the other way,
// and believes nothing but that digest.
package snapshotstore
