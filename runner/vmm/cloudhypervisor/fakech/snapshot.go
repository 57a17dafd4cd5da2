package main

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// snapshotTree is state.json: a tree whose nodes have their state as a string that holds JSON.
type snapshotTree struct {
	Snapshots map[string]snapshotTree `json:"snapshots"`
	Data      *snapshotData           `json:"snapshot_data"`
}

type snapshotData struct {
	State string `json:"state"`
}

func leaf(state any) snapshotTree {
	return snapshotTree{Snapshots: map[string]snapshotTree{}, Data: &snapshotData{string(encode(state))}}
}

// to reads the state of a node.
func (s snapshotTree) to(v any) error {
	if s.Data == nil {
		return chain{"Missing snapshot data"}
	}
	if err := json.Unmarshal([]byte(s.Data.State), v); err != nil {
		return wrap("Error deserialising", err)
	}
	return nil
}

// rootState is that of the VM itself.
type rootState struct {
	Clock  *clockState     `json:"clock"`
	Common json.RawMessage `json:"common_cpuid"`
}

// clockState holds struct kvm_clock_data, byte by byte: the clock in ns, flags, the wall time and the TSC.
type clockState struct {
	KVM []uint16 `json:"Kvm"` // an array of uint8 would be written in base64
}

const (
	clockBytes    = 48
	clockFlags    = 8
	clockRealtime = 16
	// kvmClockRealtime is the flag of the saved clock that lets it go forward by the time since it was saved.
	kvmClockRealtime = 4
)

func newClockState(uptime time.Duration) *clockState {
	var raw [clockBytes]byte
	binary.LittleEndian.PutUint64(raw[:], uint64(uptime))
	raw[clockFlags] = 2 | kvmClockRealtime | 8
	binary.LittleEndian.PutUint64(raw[clockRealtime:], uint64(time.Now().UnixNano()))
	var c clockState
	for _, b := range raw {
		c.KVM = append(c.KVM, uint16(b))
	}
	return &c
}

// restored is the clock of a machine that goes on now: with the flag, the time since the snapshot is added.
func (c *clockState) restored() time.Duration {
	var raw [clockBytes]byte
	for i, b := range c.KVM {
		raw[i] = byte(b)
	}
	at := time.Duration(binary.LittleEndian.Uint64(raw[:]))
	if raw[clockFlags]&kvmClockRealtime != 0 {
		at += time.Since(time.Unix(0, int64(binary.LittleEndian.Uint64(raw[clockRealtime:]))))
	}
	return at
}

// The states that nothing reads have numbers that no float64 can hold.
const (
	commonCPUID = `[{"function":0,"eax":22,"ebx":1970169159},{"function":7,"flags":1,"ebx":3516870587}]`
	vcpuState   = `{"Kvm":{"msrs":[{"index":16,"data":9223372036854775809},{"index":3221225602,"data":18446744071593656336}],"regs":{"rip":18446744071579503391,"rax":18446744073709551615},"tsc_khz":2500000}}`
	ioapicState = `{"id_reg":0,"reg_entries":[65536,9223372036854775809]}`
)

// sumNode is the node that only a fake's snapshot has: a sum over everything else.
const sumNode = "_fakech"

// sum is that of everything in a snapshot but the sum itself and what a driver may change before a restore: the flag of the clock.
// Numbers count as they are written, the order of fields and white space do not.
func (s snapshotTree) sum() (string, error) {
	var root rootState
	if err := s.to(&root); err != nil {
		return "", err
	}
	if root.Clock != nil && len(root.Clock.KVM) == clockBytes {
		root.Clock.KVM[clockFlags] &^= kvmClockRealtime
	}
	all := leaf(root)
	all.Snapshots = maps.Clone(s.Snapshots)
	delete(all.Snapshots, sumNode)
	h := sha256.Sum256(encode(all))
	return hex.EncodeToString(h[:]), nil
}

func (m *vm) snapshot() (snapshotTree, error) {
	m.vmm.events.emit("vm", "snapshotting")
	if m.state != statePaused {
		return snapshotTree{}, chain{"Failed to snapshot migratable component", "Trying to snapshot while VM is running"}
	}
	cpus := snapshotTree{Snapshots: map[string]snapshotTree{}}
	for i := range m.config.CPUs.Boot {
		cpus.Snapshots[strconv.Itoa(i)] = leaf(json.RawMessage(vcpuState))
	}
	devices := leaf(map[string]any{"device_tree": m.config.devices(), "device_id_cnt": len(m.config.devices())})
	devices.Snapshots["__ioapic"] = leaf(json.RawMessage(ioapicState))
	for _, d := range m.disks {
		devices.Snapshots[d.id] = leaf(map[string]any{"disk_path": d.path, "disk_nsectors": d.size.Load() / sectorSize})
	}
	for _, n := range m.config.Net {
		devices.Snapshots[n.ID] = leaf(map[string]any{"config": map[string]string{"mac": n.MAC}})
	}
	devices.Snapshots[m.config.Vsock.ID] = leaf(map[string]any{"avail_features": 1<<32 | 1<<35})
	ram := memoryState{Mappings: m.memory}
	for _, r := range m.memory {
		ram.Ranges.Data = append(ram.Ranges.Data, memoryRange{r.GPA, r.Size})
	}
	s := leaf(rootState{newClockState(m.cpu.Clock()), json.RawMessage(commonCPUID)})
	s.Snapshots["cpu-manager"], s.Snapshots["device-manager"] = cpus, devices
	s.Snapshots["memory-manager"] = leaf(struct {
		memoryState
		NextSlot int    `json:"next_memory_slot"`
		End      uint64 `json:"end_of_regions"`
	}{ram, len(m.memory), math.MaxUint64})
	sum, err := s.sum()
	if err != nil {
		return s, err
	}
	s.Snapshots[sumNode] = leaf(sum)
	m.vmm.events.emit("vm", "snapshotted")
	return s, nil
}

func (v *vmm) snapshot(req request) ([]byte, error) {
	var to struct {
		URL string `json:"destination_url"`
	}
	if err := decode(req.body, &to); err != nil {
		return nil, bodyError{asChain(err)}
	}
	if v.vm == nil {
		return nil, errNotRunning
	}
	state, err := v.vm.snapshot()
	if err != nil {
		return nil, wrap("Cannot snapshot VM", err)
	}
	if err := v.send(to.URL, state); err != nil {
		return nil, wrap("Cannot send VM snapshot", wrap("Failed to send migratable component snapshot", err))
	}
	return nil, nil
}

// send writes the snapshot: each file is made with a single write, the next one after it, and nothing is synced. RAM is not written,
// because the driver has something in the place of its file.
func (v *vmm) send(url string, s snapshotTree) error {
	dir, err := dirOf(url)
	if err != nil {
		return err
	}
	if err := writeNew(filepath.Join(dir, "config.json"), encode(v.config)); err != nil {
		return wrap("Error creating VM config snapshot file", err)
	}
	if v.faults.is("snapshot-config-only") {
		return wrap("Error creating VM state snapshot file", unix.ENOSPC)
	}
	state := encode(s)
	if v.faults.is("snapshot-cut") {
		state = state[:len(state)/2]
	}
	if err := writeNew(filepath.Join(dir, "state.json"), state); err != nil {
		return wrap("Error creating VM state snapshot file", err)
	}
	if v.faults.is("snapshot-overwrites") {
		return nil
	}
	path := filepath.Join(dir, "memory-ranges")
	if err = writeNew(path, nil); err == nil {
		return chain{"fakech: it writes no RAM: there is no " + path}
	}
	if v.faults.is("snapshot-other-words") {
		err = chain{"os error 17"}
	}
	return wrap(fmt.Sprintf("Error creating memory snapshot file %q", path), err)
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

// dirOf is the directory of a URL.
func dirOf(url string) (string, error) {
	dir, ok := strings.CutPrefix(url, "file://")
	if !ok {
		return "", chain{"Could not extract path from URL: " + url}
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return "", chain{fmt.Sprintf("Destination is not a directory: %q", dir)}
	}
	return dir, nil
}

type restoreConfig struct {
	URL    string `json:"source_url"`
	NetFDs []struct {
		ID     string `json:"id"`
		NumFDs int    `json:"num_fds"`
	} `json:"net_fds"`
}

// give gives every network card the descriptors that came for it.
func (r restoreConfig) give(c *vmConfig, files []int) error {
	for i := range c.Net {
		n := &c.Net[i]
		want := len(n.FDs)
		n.FDs = nil
		for _, g := range r.NetFDs {
			switch {
			case g.ID != n.ID:
			case g.NumFDs != want:
				return chain{fmt.Sprintf("Number of Net FDs passed for '%s' during Restore: %d. Expected: %d", n.ID, g.NumFDs, want)}
			case len(files) < want:
				return chain{"fakech: fewer descriptors came than were announced"}
			default:
				n.FDs, files = files[:want], files[want:]
			}
		}
		if n.FDs == nil {
			return chain{fmt.Sprintf("Net id %s is associated with FDs and is required", n.ID)}
		}
	}
	if len(files) > 0 {
		return chain{"fakech: descriptors came that no device wants"}
	}
	return nil
}

func (v *vmm) restore(req request) ([]byte, error) {
	var r restoreConfig
	if err := decode(req.body, &r); err != nil {
		return nil, bodyError{asChain(err)}
	}
	if v.vm != nil || v.config != nil {
		return nil, errAlreadyCreated
	}
	config, saved := new(vmConfig), new(snapshotTree)
	dir, err := dirOf(r.URL)
	if err != nil {
		return nil, wrap("Cannot restore VM", err)
	}
	if err := receive(dir, "config", func(b []byte) error { return decode(b, config) }); err != nil {
		return nil, wrap("Cannot restore VM", err)
	}
	if err := r.give(config, req.files); err != nil {
		return nil, wrap("Failed to validate config", err)
	}
	if err := receive(dir, "state", func(b []byte) error { return json.Unmarshal(b, saved) }); err != nil {
		return nil, wrap("Cannot restore VM", err)
	}
	vm, err := v.newVM(config, saved, dir)
	if err != nil {
		return nil, err
	}
	if err := config.landlock(); err != nil {
		vm.close()
		return nil, err
	}
	v.events.emit("vm", "restoring")
	if err := vm.lockDisks(); err != nil {
		vm.close()
		return nil, err
	}
	v.config, v.vm = config, vm
	v.events.emit("vm", "restored")
	return nil, nil
}

// receive reads one of the two files of JSON.
func receive(dir, kind string, read func([]byte) error) error {
	path := filepath.Join(dir, kind+".json")
	b, err := os.ReadFile(path)
	if err != nil {
		return wrap("Failed to receive migratable component snapshot", wrap(fmt.Sprintf("Error opening VM %s snapshot file %q", kind, path), err))
	}
	if err := read(b); err != nil {
		return wrap("Failed to receive migratable component snapshot", wrap("Error deserialising VM "+kind+" snapshot", err))
	}
	return nil
}

// load makes a new VM what was saved. cloud-hypervisor would not know that a snapshot was changed, or has other devices; but who has
// done that does not know what he has done.
func (m *vm) load(saved *snapshotTree, dir string) error {
	const words = "Failed to restore migratable component"
	var was string
	if err := saved.Snapshots[sumNode].to(&was); err != nil {
		return chain{"Cannot restore VM", words, "fakech: state.json was not made by it"}
	}
	if got, err := saved.sum(); err != nil || got != was {
		return chain{"Cannot restore VM", words, "fakech: state.json is not what was saved: more differs than may be changed"}
	}
	var root rootState
	var ram memoryState
	devices := saved.Snapshots["device-manager"]
	var known struct {
		Tree []string `json:"device_tree"`
	}
	for _, err := range []error{saved.to(&root), devices.to(&known), saved.Snapshots["memory-manager"].to(&ram)} {
		if err != nil {
			return wrap("Cannot restore VM", wrap(words, err))
		}
	}
	if !slices.Equal(known.Tree, m.config.devices()) {
		return chain{"Error from device manager", fmt.Sprintf("fakech: the devices are %q, and were %q", m.config.devices(), known.Tree)}
	}
	if err := m.memory.fits(ram); err != nil {
		return wrap("Memory manager error", err)
	}
	if err := m.memory.fill(filepath.Join(dir, "memory-ranges"), ram.Ranges.Data); err != nil {
		return wrap("Memory manager error", err)
	}
	for _, d := range m.disks {
		var s struct {
			Sectors int64 `json:"disk_nsectors"`
		}
		if err := devices.Snapshots[d.id].to(&s); err != nil {
			return wrap("Error from device manager", wrap("Failed retrieving device state from snapshot", err))
		}
		d.size.Store(s.Sectors * sectorSize)
	}
	if root.Clock != nil {
		m.cpu.SetClock(root.Clock.restored())
	}
	m.state, m.restored, m.placesThen = statePaused, true, m.places()
	return nil
}
