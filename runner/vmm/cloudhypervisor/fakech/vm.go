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
	memory memory
	disks  []*disk
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

// newVM makes a VM of a configuration, and of a snapshot in a directory if there is one.
func (v *vmm) newVM(c *vmConfig, saved *snapshotTree, dir string) (_ *vm, err error) {
	if err := c.validate(); err != nil {
		return nil, wrap("Failed to validate config", err)
	}
	m := &vm{vmm: v, config: c, state: stateCreated}
	m.lifeCtx, m.endLife = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	if m.memory, err = mapRAM(c.Memory.Zones[0]); err != nil {
		return nil, wrap("Memory manager error", err)
	}
	m.cpu = cpu.New(m.memory[0].mem)
	if m.serial, err = newSerial(c.Serial.Socket); err != nil {
		return nil, err
	}
	if err := m.addDevices(); err != nil {
		return nil, wrap("Error from device manager", err)
	}
	if saved != nil {
		if err := m.load(saved, dir); err != nil {
			return nil, err
		}
	}
	if c.Payload.Initramfs != "" {
		if _, err := os.Stat(c.Payload.Initramfs); err != nil {
			return nil, wrap("Cannot open initramfs file", err)
		}
	}
	return m, nil
}

func (m *vm) addDevices() error {
	for _, c := range m.config.Disks {
		d, err := openDisk(c)
		if err != nil {
			return err
		}
		m.disks = append(m.disks, d)
	}
	for i := range m.config.Net {
		if err := m.config.Net[i].open(); err != nil {
			return wrap("Cannot create virtio-net device", err)
		}
	}
	var err error
	m.vsock, err = newVsock(m.config.Vsock.Socket, m.cpu, m.vmm.faults)
	return err
}

// open takes a tap for the VM. What is no tap is refused.
func (n *netConfig) open() error {
	request, err := unix.NewIfreq("any")
	if err != nil {
		return err
	}
	for _, fd := range n.FDs {
		if err := unix.IoctlIfreq(fd, unix.TUNGETIFF, request); err != nil {
			return wrap("Using existing tap", wrap(fmt.Sprintf("Ioctl failed (%d)", unix.TUNGETIFF), err))
		}
	}
	return nil
}

// loadKernel looks whether a file is a kernel: an ELF, or a bzImage by what its setup header has at 0x202.
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
	const words = "Kernel Loader: Invalid bzImage"
	return chain{"Cannot load the kernel into memory", "Kernel Loader: failed to load bzImage kernel image: " + words, words}
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
	clear(m.memory[0].mem[:pageSize]) // a kernel trusts nothing that it finds in RAM; the program begins here
	m.run()
	return nil
}

// change leaves a state for another.
func (m *vm) change(to vmState) error {
	if m.state == to {
		return chain{fmt.Sprintf("Invalid transition: InvalidStateTransition(%s, %s)", m.state, to)}
	}
	return nil
}

func (m *vm) pause() error {
	m.vmm.events.emit("vm", "pausing")
	if err := m.change(statePaused); err != nil {
		return err
	}
	m.cpu.Run(false)
	m.state = statePaused
	m.vmm.events.emit("vm", "paused")
	return nil
}

func (m *vm) resume() error {
	m.vmm.events.emit("vm", "resuming")
	if err := m.change(stateRunning); err != nil {
		return err
	}
	if m.restored && m.places() != m.placesThen {
		m.vsock.close()
	}
	m.restored = false
	m.run()
	m.vmm.events.emit("vm", "resumed")
	return nil
}

// places stands for what a restore takes from RAM for its devices: where they are in their queues. RAM that is changed between the
// restore and the resume leaves them behind, and the guest without its channel.
func (m *vm) places() uint32 { return crc32.ChecksumIEEE(m.memory[0].mem[:pageSize]) }

// run lets the program go on, or begin anew: that is in RAM.
func (m *vm) run() {
	m.state = stateRunning
	m.cpu.Run(true)
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
func (g guest) Off(crash bool)               { go g.m.vmm.guestEnds(g.m, crash) }

func (g guest) Accept(ctx context.Context) (io.ReadWriteCloser, error) { return g.m.vsock.accept(ctx) }

// close ends the VM, also one that was not made whole.
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
	m.memory.close()
}
