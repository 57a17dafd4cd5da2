// Package diskdiff tells what differs between the disks of two checkpoints of one image, as a guest sees them: the image's root
// file system with the sandbox's overlay on top. It reads both from outside, by packages ext4 and erofs; nothing is mounted and no
// machine runs.
//
// It knows overlayfs: files of the overlay hide those of the image, whiteouts remove them, opaque directories hide all below, and
// a renamed directory of the image says where it was (redirect). What both sides have only in the image is equal and is not looked
// at; of files in both overlays, blocks that the host's file system shares are equal and are not read.
//
// The overlay is the guest's: see package ext4. What of it cannot be read is left out and counted, so that a guest that damages its
// disk makes its own answer poorer and nothing else. Names are the guest's too, and any bytes.
package diskdiff
