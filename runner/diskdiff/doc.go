// Package diskdiff finds the differences between the disks of two checkpoints of one image, as a
// guest sees them: the image's root file system with the sandbox's overlay on top. It reads both
// from outside, with packages ext4 and erofs. Nothing is mounted and no machine runs.
//
// It knows overlayfs: files of the overlay hide those of the image, whiteouts remove them, opaque
// directories hide everything below, and a renamed directory of the image says where it was
// (redirect). A file that both sides have only in the image is equal and is not examined. For files
// in both overlays, blocks that the host's file system shares are equal and are not read.
//
// The overlay belongs to the guest: see package ext4. Parts that cannot be read are left out and
// counted, so a guest that damages its disk only makes its own answer poorer. Names come from the
// guest too and may be any bytes.
package diskdiff
