package memory

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Capture copies a machine's private pages. Its use brackets the pause:
//
//	c, err := Prepare(region)   // while the machine runs: estimates the delta and faults in a buffer for it
//	defer c.Close()
//	...pause...
//	err = c.Copy()              // while it is paused: one scan, one copy from memory to memory
//	...resume...
//	err = c.WriteTo(path)       // afterwards: files, checksums, whatever takes time
//
// A Capture is used by one goroutine.
type Capture struct {
	region  Region
	arena   []byte // anonymous memory, already faulted in
	extents []Extent
	used    int64

	ScanTime time.Duration // of the scan inside the pause
	CopyTime time.Duration // of the copy inside the pause
}

// slack is how much more than the estimate is prepared: what the machine may write between estimate and pause.
const slack = 8 << 20

// Prepare estimates the delta of a running machine and prepares a buffer for it.
func Prepare(r Region) (*Capture, error) {
	estimate, err := Scan(r)
	if err != nil {
		return nil, err
	}
	c := &Capture{region: r}
	if err := c.grow(min(TotalBytes(estimate)+slack, r.Size)); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Capture) grow(size int64) error {
	arena, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_POPULATE)
	if err != nil {
		return fmt.Errorf("map %d bytes to copy memory into: %w", size, err)
	}
	c.Close()
	c.arena = arena
	return nil
}

// Copy finds and copies the private pages. The machine is paused.
func (c *Capture) Copy() error {
	start := time.Now()
	extents, err := Scan(c.region)
	if err != nil {
		return err
	}
	c.ScanTime = time.Since(start)
	c.extents, c.used = extents, TotalBytes(extents)
	if c.used > int64(len(c.arena)) { // the machine wrote more than the slack since the estimate
		if err := c.grow(c.used); err != nil {
			return err
		}
	}
	start = time.Now()
	err = read(c.region, extents, c.arena[:c.used])
	c.CopyTime = time.Since(start)
	return err
}

// Bytes is the size of the delta.
func (c *Capture) Bytes() int64 { return c.used }

// Delta returns the copied pages. It shares the capture's memory and is valid until Close.
func (c *Capture) Delta() *Delta {
	return &Delta{Size: c.region.Size, Extents: c.extents, data: c.arena[:c.used]}
}

// Close frees the buffer. Idempotent.
func (c *Capture) Close() {
	if c.arena != nil {
		_ = unix.Munmap(c.arena) // fails only for a range that was never mapped
		c.arena = nil
	}
}
