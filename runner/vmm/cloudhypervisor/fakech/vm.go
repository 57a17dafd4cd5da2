package main

import (
	"bytes"
	"context"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
	tree   map[string]deviceNode
	count  uint64 // of device names
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
	m := &vm{vmm: v, config: c, state: stateCreated, tree: map[string]deviceNode{}}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	if m.memory, err = v.newMemory(c, saved, dir); err != nil {
		return nil, wrap("Memory manager error", err)
	}
	if err := c.validate(); err != nil {
		return nil, wrap("Failed to validate config", err)
	}
	if saved != nil {
		m.state = statePaused
		var known managerState
		if err := saved.Snapshots["device-manager"].to(&known); err != nil {
			return nil, wrap("Error from device manager", wrap("Failed retrieving device state from snapshot", err))
		}
		m.count = known.Count
	}
	if err := m.addDevices(saved); err != nil {
		return nil, wrap("Error from device manager", err)
	}
	if saved != nil {
		m.activated()
	}
	if c.Payload.Initramfs != nil {
		f, err := os.Open(*c.Payload.Initramfs)
		if err != nil {
			return nil, wrap("Cannot open initramfs file", err)
		}
		_ = f.Close() // it would be read here
	}
	m.cpu = cpu.New(m.memory.maps[0].mem)
	m.lifeCtx, m.endLife = context.WithCancel(context.Background())
	if m.vsock != nil {
		m.vsock.run(m.cpu)
	}
	return m, nil
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

func (v *vmm) newMemory(c *vmConfig, saved *snapshotTree, dir string) (*memory, error) {
	if saved == nil {
		return newMemory(c.Memory)
	}
	var s memoryState
	node, ok := saved.Snapshots["memory-manager"]
	if !ok {
		return newMemory(c.Memory)
	}
	if err := node.to(&s); err != nil {
		return nil, wrap("Cannot restore VM", wrap("Failed to restore migratable component", err))
	}
	m, err := restoreMemory(c.Memory, s)
	if err != nil {
		return nil, err
	}
	if err := m.fill(filepath.Join(dir, "memory-ranges"), s.Ranges.Data); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

// name gives a device without a name the next one.
func (m *vm) name(id **string, prefix string) string {
	if *id == nil {
		for {
			n := fmt.Sprintf("%s%d", prefix, m.count)
			m.count++
			if _, taken := m.tree[n]; !taken {
				*id = &n
				break
			}
		}
	}
	return **id
}

// plug puts a device into the tree.
func (m *vm) plug(id string, pci bool) string {
	node := deviceNode{ID: id, Resources: []map[string]any{}, Children: []string{}}
	if !pci {
		m.tree[id] = node
		return ""
	}
	bus := "_virtio-pci-" + id
	slot := 1
	for name := range m.tree {
		if strings.HasPrefix(name, "_virtio-pci-") {
			slot++
		}
	}
	bdf := fmt.Sprintf("0000:00:%02x.0", slot)
	node.Parent = &bus
	m.tree[id] = node
	m.tree[bus] = deviceNode{ID: bus, Resources: []map[string]any{}, Children: []string{id}, BDF: &bdf}
	return bdf
}

// addDevices makes the devices in cloud-hypervisor's order.
func (m *vm) addDevices(saved *snapshotTree) error {
	m.plug("__ioapic", false)
	m.serial = newSerial(m.vmm.console)
	m.plug("__serial", false)
	// Devices are taken out of the configuration until all of a kind are made: when one cannot be, they are lost.
	disks := m.config.Disks
	m.config.Disks = nil
	for i := range disks {
		c := &disks[i]
		id := m.name(&c.ID, "_disk")
		d, err := openDisk(c)
		if err != nil {
			return err
		}
		m.disks = append(m.disks, d)
		m.plug(id, true)
		if saved == nil {
			continue
		}
		if node, ok := saved.Snapshots["device-manager"].Snapshots[id]; ok {
			var s blockState
			if err := node.to(&s); err != nil {
				return wrap("Failed retrieving device state from snapshot", err)
			}
			d.size.Store(int64(s.Sectors) * sectorSize)
		}
	}
	m.config.Disks = disks
	for i := range m.config.Net {
		if _, err := m.openNet(&m.config.Net[i]); err != nil {
			return err
		}
	}
	m.plug("__rng", true)
	if c := m.config.Vsock; c != nil {
		id := m.name(&c.ID, "_vsock")
		s, err := newVsock(c.Socket, m.vmm.faults)
		if err != nil {
			return err
		}
		m.vsock = s
		m.plug(id, true)
	}
	return nil
}

// openNet takes a copy of the descriptor of a tap, as cloud-hypervisor does; what is no tap is refused.
func (m *vm) openNet(c *netConfig) (bdf string, err error) {
	id := m.name(&c.ID, "_net")
	if c.Tap != nil || c.FDs == nil {
		return "", chain{"Cannot create virtio-net device", "Failed to open taps", "fakech: it takes taps as descriptors only"}
	}
	for _, fd := range c.FDs {
		own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return "", wrap("Cannot create virtio-net device", wrap("Error calling dup() on tap fd", err))
		}
		m.nics = append(m.nics, own)
		var ifreq [40]byte
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(own), unix.TUNGETIFF, uintptr(unsafe.Pointer(&ifreq))); errno != 0 {
			return "", wrap("Cannot create virtio-net device", wrap("Using existing tap", wrap(fmt.Sprintf("Ioctl failed (%d)", unix.TUNGETIFF), errno)))
		}
	}
	return m.plug(id, true), nil
}

type pciInfo struct {
	ID  string `json:"id"`
	BDF string `json:"bdf"`
}

func (m *vm) addNet(c *netConfig) (pciInfo, error) {
	bdf, err := m.openNet(c)
	if err != nil {
		return pciInfo{}, err
	}
	return pciInfo{*c.ID, bdf}, nil
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
	if err := loadKernel(*m.config.Payload.Kernel); err != nil {
		return err
	}
	clear(m.memory.maps[0].mem[:pageSize]) // a kernel trusts nothing that it finds in RAM; the program begins here
	m.state = stateRunning
	m.cpu.Run(true)
	m.startGuest()
	return nil
}

// activated says that the guest's drivers have taken their devices.
func (m *vm) activated() {
	var ids []string
	for id, n := range m.tree {
		if n.Parent != nil && id != "__rng" { // for which the guests of tests have no driver
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	for _, id := range ids {
		m.vmm.events.emit("virtio-device", "activated", map[string]string{"id": id})
	}
}

func (m *vm) transition(to vmState) error {
	if m.state == to || m.state == stateCreated && to == stateCreated {
		return chain{fmt.Sprintf("Invalid transition: InvalidStateTransition(%s, %s)", m.state, to)}
	}
	return nil
}

func (m *vm) pause() error {
	m.vmm.events.emit("vm", "pausing", nil)
	if err := m.transition(statePaused); err != nil {
		return err
	}
	m.cpu.Run(false)
	m.state = statePaused
	m.vmm.events.emit("vm", "paused", nil)
	return nil
}

func (m *vm) resume() error {
	m.vmm.events.emit("vm", "resuming", nil)
	if err := m.transition(stateRunning); err != nil {
		return err
	}
	if m.restored && m.places() != m.placesThen && m.vsock != nil {
		m.vsock.close()
	}
	m.restored = false
	m.cpu.Run(true)
	m.startGuest()
	m.state = stateRunning
	m.vmm.events.emit("vm", "resumed", nil)
	return nil
}

// places stands for what a restore takes from RAM for its devices: where they are in their queues. RAM that is changed between the
// restore and the resume leaves them behind, and the guest without its channel.
func (m *vm) places() uint32 { return crc32.ChecksumIEEE(m.memory.maps[0].mem[:4096]) }

// startGuest starts the program, which begins again or goes on: that is in RAM.
func (m *vm) startGuest() {
	if m.started {
		return
	}
	m.started = true
	g := guest{m}
	if c := m.config.Payload.CommandLine; c != nil && strings.Contains(" "+*c+" ", " coppice.probe=1 ") {
		go func() {
			_ = m.cpu.Do(func([]byte) { // it may have ended
				g.Print([]byte("COPPICE_PROBE_OK\n"))
				g.Off(false)
			})
		}()
		return
	}
	disks := make([]line.Disk, 0, len(m.disks))
	for _, d := range m.disks {
		disks = append(disks, line.Blocks{Device: d})
	}
	m.guest.Go(func() { line.Serve(m.lifeCtx, g, disks, true) })
}

// guest is the VM as its program sees it.
type guest struct{ m *vm }

func (g guest) Do(fn func(ram []byte)) error { return g.m.cpu.Do(fn) }
func (g guest) Uptime() time.Duration        { return g.m.cpu.Uptime() }
func (g guest) Print(b []byte)               { g.m.serial.output(bytes.ReplaceAll(b, []byte("\n"), []byte("\r\n"))) }
func (g guest) Off(crash bool)               { go g.m.vmm.guestEnds(g.m, crash) }

func (g guest) Accept(ctx context.Context) (io.ReadWriteCloser, error) {
	if g.m.vsock == nil {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	return g.m.vsock.accept(ctx)
}

// close ends the VM, also one that was not made whole.
func (m *vm) close() {
	if m.cpu != nil {
		m.endLife()
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
	for _, fd := range m.nics {
		_ = unix.Close(fd)
	}
	if m.memory != nil {
		m.memory.close()
	}
}

func (m *vm) resizeDisk(id string, size uint64) error {
	for _, d := range m.disks {
		if d.id == id {
			return d.resize(size)
		}
	}
	return chain{"Failed to find device corresponding to the given identifier: " + id}
}

func (m *vm) counters() map[string]map[string]uint64 {
	out := map[string]map[string]uint64{}
	for _, d := range m.disks {
		out[d.id] = map[string]uint64{
			"read_ops": d.reads.Load(), "read_bytes": d.readBytes.Load(), "write_ops": d.writes.Load(), "write_bytes": d.writtenBytes.Load(),
			"read_latency_min": 1, "read_latency_max": 1, "read_latency_avg": 1, "write_latency_min": 1, "write_latency_max": 1, "write_latency_avg": 1,
		}
	}
	return out
}
