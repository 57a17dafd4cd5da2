package main

import (
	"encoding/binary"
	"errors"
	"os"
)

// writeQCOW2 writes an empty qcow2 image on top of a raw file. It replaces qemu-img, which may not be installed. The
// image has a header, one cluster each for the table and the block of reference counts, and the first-level table. The
// format is in QEMU's docs/interop/qcow2.txt.
func writeQCOW2(path, backing string, size int64) (err error) {
	const (
		clusterBits = 16
		cluster     = 1 << clusterBits
		headerBytes = 104
		perL1       = cluster / 8 * cluster // bytes that one entry of the first level is for
		formatExt   = 0xe2792aca
	)
	be := binary.BigEndian
	l1 := (size + perL1 - 1) / perL1
	if l1*8 > cluster {
		return errors.New("the disk is too large for one cluster of first-level table")
	}
	h := make([]byte, 4*cluster)
	copy(h, "QFI\xfb")
	be.PutUint32(h[4:], 3)             // version
	be.PutUint32(h[20:], clusterBits)  //
	be.PutUint64(h[24:], uint64(size)) //nolint:gosec // G115: a file's size
	be.PutUint32(h[36:], uint32(l1))   //nolint:gosec // G115: checked above
	be.PutUint64(h[40:], 3*cluster)    // first-level table
	be.PutUint64(h[48:], 1*cluster)    // reference counts' table
	be.PutUint32(h[56:], 1)            // of one cluster
	be.PutUint32(h[96:], 4)            // 16 bits a count
	be.PutUint32(h[100:], headerBytes) //
	at := headerBytes                  // extensions
	be.PutUint32(h[at:], formatExt)    //
	be.PutUint32(h[at+4:], 3)          //
	at += 8 + copy(h[at+8:], "raw\x00\x00\x00\x00\x00")
	at += 8                                    // the end of the extensions
	be.PutUint64(h[8:], uint64(at))            //nolint:gosec // G115: a few hundred
	be.PutUint32(h[16:], uint32(len(backing))) //nolint:gosec // G115: a path
	copy(h[at:], backing)
	be.PutUint64(h[cluster:], 2*cluster) // the only block of counts
	for i := range 4 {
		be.PutUint16(h[2*cluster+2*i:], 1)
	}
	return os.WriteFile(path, h, 0o600)
}
