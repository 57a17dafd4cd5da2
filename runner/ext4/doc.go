// Package ext4 reads the file system of a sandbox's writable disk from outside, without mounting
// it: superblock, inodes, directories, extents and extended attributes. It never writes.
//
// A guest wrote everything on such a disk, perhaps around its kernel. So the package checks every
// index, length and count against what the disk can hold before it uses it. Trees are bounded in
// depth and ordered, which rules out loops, and everything without a natural bound has one here. A
// disk that breaks a rule is Damaged; a caller that reads on skips that object and says so.
//
// The package reads what package images formats: extents, no journal, no 64-bit block numbers, no
// metadata checksums, 32-byte group descriptors. It refuses anything else, including a journal that
// a guest has added: there is nothing to replay.
package ext4
