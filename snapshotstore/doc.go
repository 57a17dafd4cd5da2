// Package snapshotstore keeps checkpoints in a blob store. It writes the data that a checkpoint has
// and an earlier one does not have, and reads any page of any checkpoint back, verified.
//
// A checkpoint is a few images: memory, disk, device state. Their pages are in frames,
// zstd-compressed, each with a sha256. Frames are in packs, which are objects that are written
// once. A manifest maps every page of every image to its frame (package manifest). Packs are
// durable before the manifest that names them, and the manifest is durable before the row that has
// its digest. Reading goes in the other direction and trusts only that digest.
package snapshotstore
