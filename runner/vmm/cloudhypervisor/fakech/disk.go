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

// disk is a virtio-blk device. Its size is what the guest was told; after a restore, that is the size in the snapshot.
type disk struct {
	id       string
	readOnly bool
	file     *os.File
	size     atomic.Int64
}

func openDisk(c diskConfig) (*disk, error) {
	mode := os.O_RDWR
	if c.ReadOnly {
		mode = os.O_RDONLY
	}
	f, err := os.OpenFile(c.Path, mode, 0)
	if err != nil {
		return nil, wrap("Cannot open disk path", wrap(fmt.Sprintf("I/O error (path=%s op=open)", c.Path), err))
	}
	d := &disk{id: c.ID, readOnly: c.ReadOnly, file: f}
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

// detect checks that the file is a raw disk, and is said to be one.
func (d *disk) detect(c diskConfig) error {
	head := make([]byte, sectorSize)
	if _, err := d.file.ReadAt(head, 0); err != nil {
		return wrap("Cannot open disk path", wrap("I/O error (op=detect_image_type)", err))
	}
	if c.ImageType != "Raw" || bytes.HasPrefix(head, []byte("QFI\xfb")) {
		return chain{fmt.Sprintf("fakech: it has raw disks only, and the type is %q", c.ImageType)}
	}
	return nil
}

// lock takes the advisory lock: one writer, or readers.
func (d *disk) lock() error {
	kind, name := int16(unix.F_WRLCK), "Write"
	if d.readOnly {
		kind, name = unix.F_RDLCK, "Read"
	}
	if unix.FcntlFlock(d.file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind, Len: d.size.Load()}) != nil {
		return chain{
			"Error locking disk images: Another instance likely holds a lock", "Cannot lock images of all block devices",
			fmt.Sprintf("Failed to get %s lock for disk image: %s", name, d.file.Name()), "The file is already locked",
		}
	}
	return nil
}

// resize tells the guest another size, and changes the file.
func (d *disk) resize(size uint64) error {
	if size%sectorSize != 0 {
		return chain{"Error from device manager", "Disk resize error", "Disk image size is not a multiple of 512"}
	}
	if err := d.file.Truncate(int64(size)); err != nil {
		return wrap("Error from device manager", wrap("Disk resize error", err))
	}
	d.size.Store(int64(size))
	return nil
}

var errIO = errors.New("I/O error")

// ReadAt reads for the guest.
func (d *disk) ReadAt(b []byte, off int64) (int, error) {
	if off+int64(len(b)) > d.size.Load() {
		return 0, errIO
	}
	n, err := d.file.ReadAt(b, off)
	if errors.Is(err, io.EOF) {
		return n, errIO
	}
	return n, err
}

// WriteAt writes for the guest.
func (d *disk) WriteAt(b []byte, off int64) (int, error) {
	if d.readOnly || off+int64(len(b)) > d.size.Load() {
		return 0, errIO
	}
	return d.file.WriteAt(b, off)
}

// Size is the size that the guest sees.
func (d *disk) Size() (int64, error) { return d.size.Load(), nil }
