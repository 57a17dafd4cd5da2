package main

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// savedVM is the state of a VM before it is written.
type savedVM struct {
	tree   snapshotTree
	ranges []memoryRange
}

func (m *vm) snapshot() (savedVM, error) {
	m.vmm.events.emit("vm", "snapshotting", nil)
	var s savedVM
	if m.state != statePaused {
		return s, chain{"Failed to snapshot migratable component", "Trying to snapshot while VM is running"}
	}
	uptime := uint64(m.cpu.Clock())
	s.ranges = m.memory.ranges(m.config.Memory)
	s.tree = leaf(vmSnapshot{
		Clock: newClockState(uptime), Common: commonCPUID,
	})
	cpus := snapshotTree{Snapshots: map[string]snapshotTree{}}
	for i := range int(m.config.CPUs.Boot) {
		cpus.Snapshots[fmt.Sprint(i)] = leaf(newVCPUState(i, uptime))
	}
	devices := leaf(managerState{m.tree, m.count})
	devices.Snapshots["__ioapic"] = leaf(map[string]any{"id_reg": 0, "reg_sel": 0x3b, "reg_entries": []uint64{1 << 16, 1<<63 + 1}})
	devices.Snapshots["__serial"] = leaf(map[string]any{"interrupt_enable": 5, "line_status": 0x60, "baud_divisor": 12})
	devices.Snapshots["__rng"] = leaf(map[string]any{"avail_features": uint64(1) << 32, "acked_features": uint64(1) << 32})
	for _, d := range m.disks {
		devices.Snapshots[d.id] = leaf(blockState{
			Path: d.path, Sectors: uint64(d.size.Load()) / sectorSize, Avail: 0x130006e54, Acked: 0x130006e54,
			Geometry: map[string]uint64{"capacity": uint64(d.size.Load()) / sectorSize, "blk_size": sectorSize},
		})
	}
	for _, n := range m.config.Net {
		devices.Snapshots[*n.ID] = leaf(netState{
			Avail: 0x1308b7bc3, Acked: 0x1308b7bc3, QueueSize: []uint16{n.QueueSize, n.QueueSize},
			Config: map[string]any{"mac": n.MAC, "status": 1},
		})
	}
	if m.vsock != nil {
		devices.Snapshots[*m.config.Vsock.ID] = leaf(vsockState{1<<32 | 1<<35, 1<<32 | 1<<35, m.vsock.connections()})
	}
	s.tree.Snapshots = map[string]snapshotTree{
		"cpu-manager": cpus, "device-manager": devices, "memory-manager": leaf(m.memory.state(s.ranges)),
	}
	sum, err := s.tree.sum()
	if err != nil {
		return s, err
	}
	devices.Snapshots[sumNode] = leaf(sumState{sum})
	m.vmm.events.emit("vm", "snapshotted", nil)
	return s, nil
}

// send writes the snapshot: each file is made with a single write, the next one after it, and nothing is synced.
func (m *vm) send(url string, s savedVM) error {
	dir, err := dirOf(url)
	if err != nil {
		return err
	}
	const words = "Failed to send migratable component snapshot"
	if err := writeNew(filepath.Join(dir, "config.json"), encode(m.config)); err != nil {
		return wrap(words, wrap("Error creating VM config snapshot file", err))
	}
	if m.vmm.faults.is("snapshot-config-only") {
		return wrap(words, wrap("Error creating VM state snapshot file", unix.ENOSPC))
	}
	state := encode(s.tree)
	if m.vmm.faults.is("snapshot-cut") {
		state = state[:len(state)/2]
	}
	if err := writeNew(filepath.Join(dir, "state.json"), state); err != nil {
		return wrap(words, wrap("Error creating VM state snapshot file", err))
	}
	if len(s.ranges) == 0 {
		return nil
	}
	path := filepath.Join(dir, "memory-ranges")
	flags := os.O_RDWR | os.O_CREATE | os.O_EXCL
	if m.vmm.faults.is("snapshot-overwrites") {
		flags &^= os.O_EXCL
	}
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		if m.vmm.faults.is("snapshot-other-words") {
			err = chain{"os error 17"}
		}
		return wrap(words, wrap(fmt.Sprintf("Error creating memory snapshot file %q", path), err))
	}
	defer f.Close()
	if err := m.memory.save(f, s.ranges); err != nil {
		return wrap(words, err)
	}
	return nil
}

func writeNew(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = unix.Write(int(f.Fd()), b) // once: what does not fit is not there, and nobody notices
	return err
}

type restoredNet struct {
	ID     string `json:"id" need:"yes"`
	NumFDs int    `json:"num_fds" need:"yes"`
	fds    []int
}

type restoreConfig struct {
	URL      string        `json:"source_url" need:"yes"`
	Prefault bool          `json:"prefault"`
	Mode     restoreMode   `json:"memory_restore_mode"`
	NetFDs   []restoredNet `json:"net_fds"`
	Resume   bool          `json:"resume"`
}

type restoreMode string

func (restoreMode) variants() []string { return []string{"Copy", "OnDemand"} }

// validate looks whether every network card that has its tap as a descriptor gets as many as it wants.
func (r restoreConfig) validate(c *vmConfig) error {
	if r.Mode == "OnDemand" && r.Prefault {
		return chain{"'prefault' cannot be combined with 'memory_restore_mode=ondemand'"}
	}
	given := map[string]restoredNet{}
	for _, n := range r.NetFDs {
		if _, twice := given[n.ID]; twice {
			return chain{fmt.Sprintf("Identifier %s is not unique", n.ID)}
		}
		given[n.ID] = n
	}
	for i := range c.Net {
		n := &c.Net[i]
		if n.FDs == nil || n.ID == nil {
			continue
		}
		g, ok := given[*n.ID]
		if !ok {
			return chain{fmt.Sprintf("Net id %s is associated with FDs and is required", *n.ID)}
		}
		if g.NumFDs != len(n.FDs) {
			return chain{fmt.Sprintf("Number of Net FDs passed for '%s' during Restore: %d. Expected: %d", *n.ID, g.NumFDs, len(n.FDs))}
		}
		n.FDs = g.fds
	}
	return nil
}

func (v *vmm) restore(req request) ([]byte, error) {
	r := restoreConfig{Mode: "Copy"}
	if err := decode(req.body, &r); err != nil {
		return nil, bodyError{asChain(err)}
	}
	if r.NetFDs != nil {
		want := 0
		for _, n := range r.NetFDs {
			want += n.NumFDs
		}
		if want != len(req.files) {
			return nil, errBadRequest
		}
		rest := req.files
		for i := range r.NetFDs {
			n := &r.NetFDs[i]
			fds, err := keep(rest[:n.NumFDs])
			if err != nil {
				return nil, err
			}
			n.fds, rest = fds, rest[n.NumFDs:]
		}
	}
	if v.vm != nil || v.config != nil {
		return nil, errAlreadyCreated
	}
	b, err := receive(r.URL, "config.json", "config")
	if err != nil {
		return nil, wrap("Cannot restore VM", err)
	}
	config, err := parseConfig(b)
	if err != nil {
		return nil, wrap("Cannot restore VM", undecodable("config", err))
	}
	if err := r.validate(config); err != nil {
		return nil, wrap("Failed to validate config", err)
	}
	if r.Mode == "OnDemand" {
		return nil, chain{"fakech: it restores by copy only"}
	}
	if err = v.load(config, r.URL); err == nil && r.Resume {
		_, err = v.resume(request{})
	}
	if err != nil {
		if failed := v.delete(); failed != nil {
			return nil, failed
		}
		return nil, err
	}
	return nil, nil
}

// load makes the VM of a snapshot.
func (v *vmm) load(config *vmConfig, url string) error {
	b, err := receive(url, "state.json", "state")
	if err != nil {
		return wrap("Cannot restore VM", err)
	}
	var saved snapshotTree
	if err := decode(b, &saved); err != nil {
		return wrap("Cannot restore VM", undecodable("state", err))
	}
	if saved.Data == nil {
		return chain{"Cannot restore VM", "Failed to restore migratable component", "Could not find VM config snapshot section"}
	}
	var root vmSnapshot
	if err := saved.to(&root); err != nil {
		return wrap("Cannot restore VM", wrap("Failed to restore migratable component", err))
	}
	if err := saved.check(); err != nil {
		return wrap("Cannot restore VM", wrap("Failed to restore migratable component", err))
	}
	v.config = config
	if v.console, err = newConsole(config); err != nil {
		return err
	}
	dir, err := dirOf(url)
	if err != nil {
		return wrap("Cannot restore VM", err)
	}
	vm, err := v.newVM(config, &saved, dir)
	if err != nil {
		return err
	}
	if err := config.landlock(); err != nil {
		vm.close()
		return err
	}
	v.events.emit("vm", "restoring", nil)
	if err := vm.lockDisks(); err != nil {
		vm.close()
		return err
	}
	if root.Clock != nil {
		vm.cpu.SetClock(root.Clock.restored())
	}
	vm.restored, vm.placesThen = true, vm.places()
	v.vm = vm
	v.events.emit("vm", "restored", nil)
	return nil
}
