package fakevmm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/fakeguest"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// Guest is the program of a machine. It is called when the machine runs for the first time, after Boot or Restore. It
// returns when ctx, the life of the machine, has ended and all its goroutines have ended.
//
// It keeps all its state in RAM, and does everything within Do: a restored machine starts the program again with the
// RAM of the captured machine, which may have been stopped between any two calls of Do.
type Guest func(ctx context.Context, c *Computer)

// Computer is a machine as its guest sees it. Its methods are safe for concurrent use.
type Computer struct{ c *computer }

// Do calls fn with the RAM. It waits while the machine is paused, and only one call runs at a time. fn must be short
// and must not wait, because a pause waits for it. It returns an error after the machine has ended.
func (g *Computer) Do(fn func(ram []byte)) error { return g.c.do(fn) }

// Uptime returns how long the machine and its ancestors have run, without pauses. Call it within Do.
func (g *Computer) Uptime() time.Duration { return g.c.cpu.Uptime() }

// Accept waits for the next connection from the host. A guest that serves one connection at a time behaves like a
// serial port.
func (g *Computer) Accept(ctx context.Context) (net.Conn, error) { return g.c.accept(ctx) }

// Print writes to the console.
func (g *Computer) Print(b []byte) { _, _ = g.c.console.Write(b) } // never fails

// Disks are the machine's disks.
func (g *Computer) Disks() []*Disk { return g.c.disks }

// PowerOff ends the machine soon. It returns at once, also within Do.
func (g *Computer) PowerOff() { go g.c.end(vmm.Exit{Status: "exit status 0"}) }

// Reach is a place where a fault can be armed for the guest. It returns the error of a Fail, and fakeguest.ErrLie for a
// Lie. It handles Hang and Die itself. It must not be called within Do.
func (g *Computer) Reach(ctx context.Context, step Step) error {
	f, ok := g.c.driver.strike(step, g.c.id)
	if !ok {
		return nil
	}
	switch f.Kind {
	case Lie:
		return fakeguest.ErrLie
	case Fail:
		if f.Err != nil {
			return f.Err
		}
		return core.Errorf(core.Internal, core.CodeInternal, "fault injected at %s", step)
	case Die:
		g.c.end(vmm.Exit{Status: "signal: killed", Log: "fault injected at " + string(step)})
	case Hang:
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-g.c.lifeCtx.Done():
		return vmm.ErrGone
	}
}

// Disk is a disk of a machine.
type Disk struct {
	file     *os.File // a descriptor of our own
	readOnly bool
}

var errReadOnly = errors.New("the disk is read-only")

func newDisk(d vmm.Disk) (*Disk, error) {
	fd, err := unix.FcntlInt(d.File.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open disk %s: %w", d.Serial, err)
	}
	return &Disk{file: os.NewFile(uintptr(fd), d.File.Name()), readOnly: d.ReadOnly}, nil
}

// ReadAt reads the disk; after its written part there are zeros.
func (d *Disk) ReadAt(b []byte, off int64) (int, error) {
	n, err := d.file.ReadAt(b, off)
	if errors.Is(err, io.EOF) {
		clear(b[n:])
		return len(b), nil
	}
	return n, err
}

// WriteAt writes the disk, unless it is read-only.
func (d *Disk) WriteAt(b []byte, off int64) (int, error) {
	if d.readOnly {
		return 0, errReadOnly
	}
	return d.file.WriteAt(b, off)
}

// Size is the size of the disk in bytes.
func (d *Disk) Size() (int64, error) {
	info, err := d.file.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}
