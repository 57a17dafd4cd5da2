package fakevmm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm/cpu"
)

type state string

const (
	stateSpawned state = "spawned"
	stateWaiting state = "waiting to be restored"
	statePaused  state = "paused"
	stateRunning state = "running"
	stateFailed  state = "broken by a failed restore"
)

// computer takes the place of the VMM's process: it outlives the machines that control it.
type computer struct {
	driver  *Driver
	id      core.SandboxID
	cluster string
	handle  vmm.Handle
	inode   uint64
	disks   []*Disk
	console *vmm.Tail

	lifeCtx context.Context // the machine's life: cancelled at its end
	endLife context.CancelFunc
	guest   sync.WaitGroup // the guest program
	done    chan struct{}  // closed when everything of it has ended

	injecting sync.RWMutex // held for reading while RAM is written from outside, so that it is not unmapped

	cpu *cpu.CPU

	mu       sync.Mutex // guards the fields below
	started  bool       // the guest program runs
	runs     bool       // the machine is running, whether it is stopped or not
	stopped  bool
	over     bool // the machine has ended
	exit     vmm.Exit
	state    state
	incoming chan struct{} // of size 1; full when there are connections to accept
	dialled  []net.Conn
	conns    map[net.Conn]bool // every open end
}

func newComputer(d *Driver, spec vmm.Spec) (*computer, error) {
	bad := func(format string, a ...any) (*computer, error) {
		return nil, core.Errorf(core.Internal, core.CodeInternal, format, a...)
	}
	if spec.Base == nil {
		return bad("the base is missing")
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(spec.Base.Fd()), &st); err != nil {
		return nil, fmt.Errorf("examine the base: %w", err)
	}
	size := int64(spec.MemoryMiB) << 20
	if st.Size != size || size == 0 {
		return bad("the base has %d bytes and the machine %d MiB of RAM", st.Size, spec.MemoryMiB)
	}
	if _, err := os.Stat(spec.Dir); err != nil {
		return nil, err
	}
	c := &computer{
		driver: d, id: spec.ID, cluster: spec.Cluster, inode: st.Ino, console: vmm.NewTail(vmm.ConsoleBytes), done: make(chan struct{}),
		state: stateSpawned, incoming: make(chan struct{}, 1), conns: make(map[net.Conn]bool),
	}
	if spec.Restore {
		c.state = stateWaiting
	}
	for i, disk := range spec.Disks {
		if disk.File == nil {
			return nil, errors.Join(core.Errorf(core.Internal, core.CodeInternal, "the file of disk %d is missing", i), c.closeDisks())
		}
		own, err := newDisk(disk)
		if err != nil {
			return nil, errors.Join(err, c.closeDisks())
		}
		c.disks = append(c.disks, own)
	}
	ram, err := unix.Mmap(int(spec.Base.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("map the base: %w", err), c.closeDisks())
	}
	c.cpu = cpu.New(ram)
	c.lifeCtx, c.endLife = context.WithCancel(context.Background())
	return c, nil
}

func (c *computer) closeDisks() error {
	var errs []error
	for _, d := range c.disks {
		errs = append(errs, d.file.Close())
	}
	return errors.Join(errs...)
}

// region returns the place of the RAM.
func (c *computer) region() memory.Region {
	ram := c.cpu.RAM()
	if ram == nil {
		return memory.Region{}
	}
	return memory.OnePart(os.Getpid(), uint64(uintptr(unsafe.Pointer(unsafe.SliceData(ram)))), int64(len(ram)))
}

// run lets the guest run, and starts its program if necessary, or stops the guest. When it has stopped the guest, the
// guest does nothing more.
func (c *computer) run(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return
	}
	c.runs = on
	c.cpu.Run(on && !c.stopped)
	if on && !c.started {
		c.started = true
		guest := &Computer{c: c}
		c.guest.Go(func() { c.driver.cfg.Guest(c.lifeCtx, guest) })
	}
}

// setStopped stops the guest although the machine runs, or continues it.
func (c *computer) setStopped(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.over {
		c.stopped = on
		c.cpu.Run(c.runs && !on)
	}
}

// do runs fn as the guest's CPU: only while the machine runs, and while nothing else of the guest runs.
func (c *computer) do(fn func(ram []byte)) error {
	if c.cpu.Do(fn) != nil {
		return vmm.ErrGone
	}
	return nil
}

// end ends the machine. The guest itself may call it. It does not wait; done is closed when everything has ended.
func (c *computer) end(exit vmm.Exit) {
	c.mu.Lock()
	first := !c.over
	if first {
		c.over = true
		exit.At = time.Now()
		c.exit = exit
	}
	c.mu.Unlock()
	if first {
		c.cpu.End()
		go c.clean()
	}
}

func (c *computer) clean() {
	c.endLife()
	c.mu.Lock()
	conns := c.conns
	c.conns = nil
	c.mu.Unlock()
	for conn := range conns {
		_ = conn.Close() // like the end of a process
	}
	c.guest.Wait()
	c.injecting.Lock()
	_ = unix.Munmap(c.cpu.Drop()) // fails only for a range that was never mapped
	c.injecting.Unlock()
	c.mu.Lock()
	c.exit.Console = c.console.String()
	c.mu.Unlock()
	_ = c.closeDisks() // nothing was buffered
	c.driver.forget(c)
	close(c.done)
}

// dial makes a connection to the guest and returns the host's end.
func (c *computer) dial() (net.Conn, error) {
	host, guest, err := pair()
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conns == nil {
		return nil, errors.Join(vmm.ErrGone, host.Close(), guest.Close())
	}
	c.conns[guest] = true
	c.dialled = append(c.dialled, guest)
	select {
	case c.incoming <- struct{}{}:
	default:
	}
	return host, nil
}

// accept returns the next connection from the host.
func (c *computer) accept(ctx context.Context) (net.Conn, error) {
	for {
		c.mu.Lock()
		if len(c.dialled) > 0 {
			conn := c.dialled[0]
			c.dialled = c.dialled[1:]
			c.mu.Unlock()
			return &channel{Conn: c.cpu.Gate(conn), guest: conn, c: c}, nil
		}
		c.mu.Unlock()
		select {
		case <-c.incoming:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// channel is the guest's end of a connection.
type channel struct {
	net.Conn
	guest net.Conn // in conns
	c     *computer
}

func (ch *channel) Close() error {
	ch.c.mu.Lock()
	delete(ch.c.conns, ch.guest)
	ch.c.mu.Unlock()
	return ch.Conn.Close()
}

// pair returns the two ends of a connection that buffers unread data, like a connection to a real VMM.
func pair() (a, b net.Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a connection: %w", err)
	}
	var conns [2]net.Conn
	var errs [2]error
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "channel")
		conns[i], errs[i] = net.FileConn(f)
		_ = f.Close() // the connection has its own copy
	}
	if err := errors.Join(errs[:]...); err != nil {
		for _, conn := range conns {
			if conn != nil {
				_ = conn.Close()
			}
		}
		return nil, nil, fmt.Errorf("make a connection: %w", err)
	}
	return conns[0], conns[1], nil
}
