package main

import (
	"bytes"
	"context"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/runner/vmm/fakevmm/cpu"
	"github.com/coppice-dev/coppice/runner/vmm/vmmtest/line"
)

type vmState string

const (
	stateCreated vmState = "Created"
	stateRunning vmState = "Running"
	statePaused  vmState = "Paused"
)

// vm is a VM that was booted or restored. It is guarded by the turn of its vmm.
type vm struct {
	vmm    *vmm
	config *vmConfig
	state  vmState
	memory *memory
	disks  []*disk
	nics   []int // descriptors of taps
	vsock  *vsock
	serial *serial
	cpu    *cpu.CPU

	lifeCtx context.Context // ends with the VM
	endLife context.CancelFunc
	started bool
	guest   sync.WaitGroup

	restored   bool   // and not resumed since
	placesThen uint32 // see places
}

// newVM makes a VM of a configuration.
func (v *vmm) newVM(c *vmConfig) (_ *vm, err error) {
	m := &vm{vmm: v, config: c, state: stateCreated}
	m.lifeCtx, m.endLife = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	if m.memory, err = newMemory(c); err != nil {
		return nil, wrap("Memory manager error", err)
	}
	m.cpu = cpu.New(m.memory.maps[0].mem)
	if err := c.validate(); err != nil {
		return nil, wrap("Failed to validate config", err)
	}
	if err := m.addDevices(); err != nil {
		return nil, wrap("Error from device manager", err)
	}
	if c.Payload.Initramfs != "" {
		f, err := os.Open(c.Payload.Initramfs)
		if err != nil {
			return nil, wrap("Cannot open initramfs file", err)
		}
		_ = f.Close() // it would be read here
	}
	m.vsock.run(m.cpu)
	return m, nil
}

// loadKernel checks that a file is a kernel: an ELF, or a bzImage by what its setup header has at 0x202.
func loadKernel(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return wrap("Cannot open kernel file", err)
	}
	defer f.Close()
	head := make([]byte, 0x206)
	if _, err := io.ReadFull(f, head); err == nil && (string(head[:4]) == "\x7fELF" || string(head[0x202:]) == "HdrS") {
		return nil
	}
	return chain{"Cannot load the kernel into memory", "Kernel Loader: Invalid bzImage"}
}

// addDevices makes the devices in cloud-hypervisor's order.
func (m *vm) addDevices() error {
	m.serial = newSerial(m.vmm.console)
	for _, c := range m.config.Disks {
		d, err := openDisk(c)
		if err != nil {
			return err
		}
		m.disks = append(m.disks, d)
	}
	for _, n := range m.config.Net {
		if err := m.openTap(n.FDs[0]); err != nil {
			return wrap("Cannot create virtio-net device", err)
		}
	}
	var err error
	m.vsock, err = newVsock(m.config.Vsock.Socket, m.vmm.faults)
	return err
}

// deviceIDs are the ids of the devices in their order.
func (m *vm) deviceIDs() []string {
	var ids []string
	for _, d := range m.config.Disks {
		ids = append(ids, d.ID)
	}
	for _, n := range m.config.Net {
		ids = append(ids, n.ID)
	}
	return append(ids, m.config.Vsock.ID)
}

// openTap takes a copy of the descriptor of a tap, and refuses anything else.
func (m *vm) openTap(fd int) error {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return wrap("Error calling dup() on tap fd", err)
	}
	m.nics = append(m.nics, own)
	var ifreq [40]byte
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(own), unix.TUNGETIFF, uintptr(unsafe.Pointer(&ifreq))); errno != 0 {
		return wrap("Using existing tap", wrap(fmt.Sprintf("Ioctl failed (%d)", unix.TUNGETIFF), errno))
	}
	return nil
}

func (m *vm) lockDisks() error {
	for _, d := range m.disks {
		if err := d.lock(); err != nil {
			return err
		}
	}
	return nil
}

// boot starts the guest from nothing.
func (m *vm) boot() error {
	if err := m.lockDisks(); err != nil {
		return err
	}
	if err := loadKernel(m.config.Payload.Kernel); err != nil {
		return err
	}
	clear(m.memory.maps[0].mem[:pageSize]) // a kernel trusts nothing that it finds in RAM; the program begins here
	m.state = stateRunning
	m.cpu.Run(true)
	m.startGuest()
	return nil
}

func (m *vm) transition(to vmState) error {
	if m.state == to {
		return chain{fmt.Sprintf("Invalid transition: InvalidStateTransition(%s, %s)", m.state, to)}
	}
	return nil
}

func (m *vm) pause() error {
	if err := m.transition(statePaused); err != nil {
		return err
	}
	m.cpu.Run(false)
	m.state = statePaused
	m.vmm.events.emit("vm", "paused")
	return nil
}

func (m *vm) resume() error {
	if err := m.transition(stateRunning); err != nil {
		return err
	}
	if m.restored && m.places() != m.placesThen {
		m.vsock.close()
	}
	m.restored = false
	m.cpu.Run(true)
	m.startGuest()
	m.state = stateRunning
	m.vmm.events.emit("vm", "resumed")
	return nil
}

// places stands for what a restore takes from RAM for its devices: their positions in their queues. If RAM is changed
// between the restore and the resume, these positions are wrong, and the guest has no channel.
func (m *vm) places() uint32 { return crc32.ChecksumIEEE(m.memory.maps[0].mem[:pageSize]) }

// startGuest starts the program. It finds in RAM whether it begins or continues.
func (m *vm) startGuest() {
	if m.started {
		return
	}
	m.started = true
	disks := make([]line.Disk, 0, len(m.disks))
	for _, d := range m.disks {
		disks = append(disks, line.Blocks{Device: d})
	}
	m.guest.Go(func() { line.Serve(m.lifeCtx, guest{m}, disks, true) })
}

// guest is the VM as its program sees it.
type guest struct{ m *vm }

func (g guest) Do(fn func(ram []byte)) error { return g.m.cpu.Do(fn) }
func (g guest) Uptime() time.Duration        { return g.m.cpu.Uptime() }
func (g guest) Print(b []byte)               { g.m.serial.output(bytes.ReplaceAll(b, []byte("\n"), []byte("\r\n"))) }
func (g guest) Off(crash bool)               { go g.m.vmm.guestEnds(crash) }

func (g guest) Accept(ctx context.Context) (io.ReadWriteCloser, error) { return g.m.vsock.accept(ctx) }

// close ends the VM, also if it is not complete.
func (m *vm) close() {
	m.endLife()
	if m.cpu != nil {
		m.cpu.End()
	}
	if m.vsock != nil {
		m.vsock.close()
	}
	m.guest.Wait()
	if m.serial != nil {
		m.serial.close()
	}
	for _, d := range m.disks {
		_ = d.file.Close() // nothing was buffered
	}
	closeAll(m.nics)
	if m.memory != nil {
		m.memory.close()
	}
}
