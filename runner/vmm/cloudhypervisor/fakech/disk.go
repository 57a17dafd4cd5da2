package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const sectorSize = 512

// disk is a virtio-blk device. Its size is what the guest was told, which after a restore is that of the snapshot.
type disk struct {
	id, path string
	readOnly bool
	whole    bool // its lock covers more than its size
	file     *os.File
	size     atomic.Int64

	reads, writes, readBytes, writtenBytes atomic.Uint64
}

func openDisk(c *diskConfig) (*disk, error) {
	if c.Path == nil {
		return nil, chain{"No disk path was specified when one was expected"}
	}
	mode := os.O_RDWR
	if c.ReadOnly {
		mode = os.O_RDONLY
	}
	f, err := os.OpenFile(*c.Path, mode, 0)
	if err != nil {
		return nil, wrap("Cannot open disk path", wrap(fmt.Sprintf("I/O error (path=%s op=open)", *c.Path), err))
	}
	d := &disk{id: *c.ID, path: *c.Path, readOnly: c.ReadOnly, whole: c.LockGranularity == "Full", file: f}
	if err := d.detect(c); err != nil {
		_ = f.Close() // it was only looked at
		return nil, err
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		_ = f.Close()
		return nil, wrap("Cannot create virtio-blk device", err)
	}
	d.size.Store(size / sectorSize * sectorSize)
	return d, nil
}

// detect compares the file with the type that it is said to have.
func (d *disk) detect(c *diskConfig) error {
	head := make([]byte, sectorSize)
	if _, err := d.file.ReadAt(head, 0); err != nil {
		if errors.Is(err, io.EOF) {
			err = chain{"failed to fill whole buffer"}
		}
		return wrap("Cannot open disk path", wrap("I/O error (op=detect_image_type)", err))
	}
	detected := imageType("Raw")
	if bytes.HasPrefix(head, []byte("QFI\xfb")) {
		detected = "Qcow2"
	}
	switch {
	case c.ImageType == "Unknown":
		c.ImageType = detected
	case c.ImageType != detected:
		names := map[imageType]string{"FixedVhd": "vhd", "Qcow2": "qcow2", "Raw": "raw", "Vhdx": "vhdx"}
		return chain{fmt.Sprintf("Disk image type does not match expected type: specified = %s, detected = %s", names[c.ImageType], names[detected])}
	}
	if detected != "Raw" {
		return chain{"fakech: it has raw disks only"}
	}
	return nil
}

// lock takes the advisory lock: one writer, or readers.
func (d *disk) lock() error {
	kind, name := int16(unix.F_WRLCK), "Write"
	if d.readOnly {
		kind, name = unix.F_RDLCK, "Read"
	}
	length := d.size.Load()
	if d.whole {
		length = 0
	}
	if err := lockFile(d.file, kind, length); err != nil {
		return chain{
			"Error locking disk images: Another instance likely holds a lock", "Cannot lock images of all block devices",
			fmt.Sprintf("Failed to get %s lock for disk image: %s", name, d.path), "The file is already locked",
		}
	}
	return nil
}

// resize tells the guest another size, which the file is given too.
func (d *disk) resize(size uint64) error {
	if size%sectorSize != 0 {
		return chain{"Disk resize error", "Disk image size is not a multiple of 512"}
	}
	if err := d.file.Truncate(int64(size)); err != nil {
		return wrap("Disk resize error", wrap("Disk resize failed", wrap("I/O error", wrap("Failed resizing disk image", err))))
	}
	d.size.Store(int64(size))
	return nil
}

// ReadAt reads as the guest does.
func (d *disk) ReadAt(b []byte, off int64) (int, error) {
	if off+int64(len(b)) > d.size.Load() {
		return 0, errIO
	}
	d.reads.Add(1)
	d.readBytes.Add(uint64(len(b)))
	n, err := d.file.ReadAt(b, off)
	if errors.Is(err, io.EOF) {
		return n, errIO
	}
	return n, err
}

// WriteAt writes as the guest does.
func (d *disk) WriteAt(b []byte, off int64) (int, error) {
	if d.readOnly || off+int64(len(b)) > d.size.Load() {
		return 0, errIO
	}
	d.writes.Add(1)
	d.writtenBytes.Add(uint64(len(b)))
	return d.file.WriteAt(b, off)
}

// Size is what the guest sees.
func (d *disk) Size() (int64, error) { return d.size.Load(), nil }

var errIO = errors.New("I/O error")
