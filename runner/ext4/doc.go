// Package ext4 reads the file system of a sandbox's writable disk from outside, without mounting it: superblock, inodes,
// directories, extents and extended attributes. It never writes.
//
// Everything on such a disk was written by a guest, which may have written it around its kernel. So nothing read from it is an
// index, a length or a count before it was checked against what the disk can hold, trees are bounded in depth and ordered, which
// rules out loops, and what has no natural bound has one here. A disk that breaks a rule is Damaged; whoever reads on skips that
// object and says so.
//
// It reads what package images formats: extents, no journal, no 64-bit block numbers, no metadata checksums, 32-byte group
// descriptors. Anything else is refused, and so is a journal that a guest has added: there is nothing to replay.
package ext4
