// Package images keeps guest images: a kernel, an initrd with the guest agent, a read-only root file
// system and an empty writable overlay disk. It owns only the image store on disk: it builds no image
// (package build does), starts no virtual machine and knows no runner.
//
// An image is a directory named after its digest, which is the sha256 of its image.json. image.json
// has the sha256 and the size of every other file, the kernel's release and command line, and the
// recipe. A published image never changes; a name is a small file that points at a digest.
//
// # Crash safety
//
// Everything is written under a temporary name in the store, flushed, and published by one rename,
// under an flock. A killed writer leaves only a temporary directory, which the next writer or removal
// deletes.
package images
