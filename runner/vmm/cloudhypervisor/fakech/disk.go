package main

import (
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
	d := &disk{id: c.ID, path: c.Path, readOnly: c.ReadOnly, file: f}
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		_ = f.Close() // it was only looked at
		return nil, wrap("Cannot create virtio-blk device", err)
	}
	d.size.Store(size / sectorSize * sectorSize)
	return d, nil
}

// lock takes the advisory lock: one writer, or readers.
func (d *disk) lock() error {
	kind, name := int16(unix.F_WRLCK), "Write"
	if d.readOnly {
		kind, name = unix.F_RDLCK, "Read"
	}
	if err := unix.FcntlFlock(d.file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind, Len: d.size.Load()}); err != nil {
		return chain{
			"Error locking disk images: Another instance likely holds a lock", "Cannot lock images of all block devices",
			fmt.Sprintf("Failed to get %s lock for disk image: %s", name, d.path), "The file is already locked",
		}
	}
	return nil
}

// resize tells the guest another size, which the file is given too.
func (d *disk) resize(size int64) error {
	if size%sectorSize != 0 {
		return chain{"Disk image size is not a multiple of 512"}
	}
	if err := d.file.Truncate(size); err != nil {
		return wrap("Disk resize failed", wrap("I/O error", wrap("Failed resizing disk image", err)))
	}
	d.size.Store(size)
	return nil
}

var errIO = errors.New("I/O error")

// ReadAt reads as the guest does.
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

// WriteAt writes as the guest does.
func (d *disk) WriteAt(b []byte, off int64) (int, error) {
	if d.readOnly || off+int64(len(b)) > d.size.Load() {
		return 0, errIO
	}
	return d.file.WriteAt(b, off)
}

// Size is what the guest sees.
func (d *disk) Size() (int64, error) { return d.size.Load(), nil }
