package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// node is a node of state.json: a tree whose nodes have their state as a string that holds JSON.
type node struct {
	Snapshots map[string]node `json:"snapshots"`
	Data      *nodeData       `json:"snapshot_data"`
}

type nodeData struct {
	State string `json:"state"`
}

func leaf(state any) node {
	return node{Snapshots: map[string]node{}, Data: &nodeData{string(encode(state))}}
}

// to reads the state of a node.
func (n node) to(v any) error {
	if n.Data == nil {
		return chain{"Missing snapshot data"}
	}
	dec := json.NewDecoder(strings.NewReader(n.Data.State))
	dec.UseNumber()
	if err := dec.Decode(v); err != nil {
		return wrap("Error deserialising", err)
	}
	return nil
}

// clockState holds struct kvm_clock_data, byte by byte, as numbers: the clock in ns, flags, the wall time and the TSC.
type clockState struct {
	KVM []uint16 `json:"Kvm"`
}

const (
	clockBytes        = 48
	clockFlags        = 8 // where they are
	clockRealtime     = 16
	kvmClockRealtime  = 4 // the flag that adds the time since the clock was saved
	kvmClockOtherBits = 2 | 8
)

func newClockState(uptime time.Duration) *clockState {
	var raw [clockBytes]byte
	binary.LittleEndian.PutUint64(raw[:], uint64(uptime))
	raw[clockFlags] = kvmClockRealtime | kvmClockOtherBits
	binary.LittleEndian.PutUint64(raw[clockRealtime:], uint64(time.Now().UnixNano()))
	c := &clockState{}
	for _, b := range raw {
		c.KVM = append(c.KVM, uint16(b))
	}
	return c
}

// restored is the clock of a machine that goes on now.
func (c *clockState) restored() (time.Duration, error) {
	if c == nil || len(c.KVM) != clockBytes {
		return 0, chain{"fakech: the state has no clock"}
	}
	var raw [clockBytes]byte
	for i, b := range c.KVM {
		raw[i] = byte(b)
	}
	at := time.Duration(binary.LittleEndian.Uint64(raw[:]))
	if raw[clockFlags]&kvmClockRealtime != 0 {
		at += time.Since(time.Unix(0, int64(binary.LittleEndian.Uint64(raw[clockRealtime:]))))
	}
	return at, nil
}

// The states of the components, with numbers that no float64 can hold.
type (
	rootState struct {
		Clock  *clockState `json:"clock"`
		Common []uint64    `json:"common_cpuid"`
	}
	memoryState struct {
		Ranges []memoryRange `json:"memory_ranges"`
	}
	diskState struct {
		Sectors int64 `json:"disk_nsectors"`
	}
	deviceState struct {
		IDs []string `json:"device_tree"` // in the order of the devices
	}
)

// sumNode is the node that only a fake's snapshot has: a sum over everything else.
const sumNode = "_fakech"

// sum covers everything in a snapshot, except for the one thing that the driver may change: the flag of the clock. The
// order of fields does not matter.
func (n node) sum() (string, error) {
	var root map[string]any
	if err := n.to(&root); err != nil {
		return "", err
	}
	clocks, _ := root["clock"].(map[string]any)
	if clock, _ := clocks["Kvm"].([]any); len(clock) == clockBytes {
		number, _ := clock[clockFlags].(json.Number)
		flags, err := number.Int64()
		if err != nil {
			return "", err
		}
		clock[clockFlags] = flags &^ kvmClockRealtime
	}
	rest := maps.Clone(n.Snapshots)
	delete(rest, sumNode)
	sum := sha256.Sum256(bytes.Join([][]byte{encode(rest), encode(root)}, nil))
	return hex.EncodeToString(sum[:]), nil
}

// check fails if a snapshot is not what was saved. cloud-hypervisor would not notice; but a driver that changes
// anything else does not know what it changes.
func (n node) check() error {
	var was string
	if err := n.Snapshots[sumNode].to(&was); err != nil {
		return wrap("fakech: state.json was not made by it", err)
	}
	got, err := n.sum()
	if err != nil {
		return wrap("fakech: state.json is not what was saved", err)
	}
	if got != was {
		return chain{"fakech: state.json is not what was saved: more differs than may be changed"}
	}
	return nil
}

func (v *vmm) snapshot(req request) ([]byte, error) {
	var to struct {
		URL string `json:"destination_url"`
	}
	if err := decode(req.body, &to); err != nil {
		return nil, bodyError{wrap("Failed to deserialize JSON", err)}
	}
	if v.vm == nil {
		return nil, errNotRunning
	}
	if v.vm.state != statePaused {
		return nil, chain{"Cannot snapshot VM", "Failed to snapshot migratable component", "Trying to snapshot while VM is running"}
	}
	state, err := v.vm.saved()
	if err != nil {
		return nil, err
	}
	if err := v.vm.send(to.URL, state); err != nil {
		return nil, wrap("Cannot send VM snapshot", wrap("Failed to send migratable component snapshot", err))
	}
	return nil, nil
}

// saved is the state of a paused VM.
func (m *vm) saved() (node, error) {
	root := leaf(rootState{Clock: newClockState(m.cpu.Clock()), Common: []uint64{math.MaxUint64}})
	cpus := node{Snapshots: map[string]node{}}
	for i := range m.config.CPUs.Boot {
		cpus.Snapshots[fmt.Sprint(i)] = leaf(map[string]uint64{"rax": math.MaxUint64, "rip": 0xffffffff810a0b1f})
	}
	devices := leaf(deviceState{m.deviceIDs()})
	for _, d := range m.disks {
		devices.Snapshots[d.id] = leaf(diskState{d.size.Load() / sectorSize})
	}
	root.Snapshots = map[string]node{"cpu-manager": cpus, "device-manager": devices, "memory-manager": leaf(memoryState{m.memory.ranges()})}
	sum, err := root.sum()
	if err != nil {
		return node{}, err
	}
	root.Snapshots[sumNode] = leaf(sum)
	return root, nil
}

// send writes the snapshot: the files one after the other, each with a single write, and nothing is synced. The bytes of
// RAM are not written, because nobody may read them.
func (m *vm) send(url string, root node) error {
	dir, err := dirOf(url)
	if err != nil {
		return err
	}
	if err := writeNew(filepath.Join(dir, "config.json"), encode(m.config)); err != nil {
		return wrap("Error creating VM config snapshot file", err)
	}
	if m.vmm.faults.is("snapshot-config-only") {
		return wrap("Error creating VM state snapshot file", unix.ENOSPC)
	}
	state := encode(root)
	if m.vmm.faults.is("snapshot-cut") {
		state = state[:len(state)/2]
	}
	if err := writeNew(filepath.Join(dir, "state.json"), state); err != nil {
		return wrap("Error creating VM state snapshot file", err)
	}
	path := filepath.Join(dir, "memory-ranges")
	if m.vmm.faults.is("snapshot-overwrites") {
		return nil
	}
	if err := writeNew(path, nil); err != nil {
		if m.vmm.faults.is("snapshot-other-words") {
			err = chain{"os error 17"}
		}
		return wrap(fmt.Sprintf("Error creating memory snapshot file %q", path), err)
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

type restoredNet struct {
	ID     string `json:"id"`
	NumFDs int    `json:"num_fds"`
}

func (v *vmm) restore(req request) ([]byte, error) {
	var from struct {
		URL    string        `json:"source_url"`
		NetFDs []restoredNet `json:"net_fds"`
	}
	if err := decode(req.body, &from); err != nil {
		return nil, bodyError{wrap("Failed to deserialize JSON", err)}
	}
	if v.vm != nil || v.config != nil {
		return nil, errAlreadyCreated
	}
	dir, err := dirOf(from.URL)
	if err != nil {
		return nil, wrap("Cannot restore VM", err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return nil, wrap("Cannot restore VM", wrap("Error opening VM config snapshot file", err))
	}
	config, err := parseConfig(b)
	if err != nil {
		return nil, wrap("Cannot restore VM", wrap("Error deserialising VM config snapshot", err))
	}
	if err := config.connect(from.NetFDs, req.files); err != nil {
		return nil, err
	}
	if err := v.load(config, dir); err != nil {
		v.config, v.console = nil, nil
		return nil, err
	}
	return nil, nil
}

// connect gives every network card its descriptor of a tap.
func (c *vmConfig) connect(nets []restoredNet, files []int) error {
	want := []restoredNet{}
	for _, n := range c.Net {
		want = append(want, restoredNet{n.ID, len(n.FDs)})
	}
	if len(want)+len(nets) > 0 && !reflect.DeepEqual(want, nets) || len(want) != len(files) {
		return chain{fmt.Sprintf("Net FDs passed during Restore: %v, with %d files. Expected: %v", nets, len(files), want)}
	}
	for i := range c.Net {
		var err error
		if c.Net[i].FDs, err = keep(files[i : i+1]); err != nil {
			return err
		}
	}
	return nil
}

// load makes the VM of a snapshot.
func (v *vmm) load(config *vmConfig, dir string) error {
	b, err := os.ReadFile(filepath.Join(dir, "state.json"))
	if err != nil {
		return wrap("Cannot restore VM", wrap("Error opening VM state snapshot file", err))
	}
	var saved node
	if err := decode(b, &saved); err != nil {
		return wrap("Cannot restore VM", wrap("Error deserialising VM state snapshot", err))
	}
	if err := saved.check(); err != nil {
		return wrap("Cannot restore VM", wrap("Failed to restore migratable component", err))
	}
	var root rootState
	if err := saved.to(&root); err != nil {
		return wrap("Cannot restore VM", err)
	}
	clock, err := root.Clock.restored()
	if err != nil {
		return err
	}
	v.config = config
	if v.console, err = newConsole(config); err != nil {
		return err
	}
	vm, err := v.newVM(config)
	if err == nil {
		err = vm.loadSaved(saved, filepath.Join(dir, "memory-ranges"))
	}
	if err == nil {
		err = config.landlock()
	}
	if err == nil {
		err = vm.lockDisks()
	}
	if err != nil {
		if vm != nil {
			vm.close()
		}
		return err
	}
	vm.cpu.SetClock(clock)
	vm.state, vm.restored, vm.placesThen = statePaused, true, vm.places()
	v.vm = vm
	v.events.emit("vm", "restored")
	return nil
}

// loadSaved puts RAM and devices into the state of a snapshot, which must come from the same devices.
func (m *vm) loadSaved(saved node, ram string) error {
	var had memoryState
	if err := saved.Snapshots["memory-manager"].to(&had); err != nil {
		return err
	}
	if got := m.memory.ranges(); !reflect.DeepEqual(got, had.Ranges) {
		return chain{fmt.Sprintf("fakech: RAM is in %v and was in %v", got, had.Ranges)}
	}
	devices := saved.Snapshots["device-manager"]
	var known deviceState
	if err := devices.to(&known); err != nil {
		return err
	}
	if got := m.deviceIDs(); !reflect.DeepEqual(got, known.IDs) {
		return chain{fmt.Sprintf("fakech: the devices are %v and were %v", got, known.IDs)}
	}
	for _, d := range m.disks {
		var s diskState
		if err := devices.Snapshots[d.id].to(&s); err != nil {
			return err
		}
		d.size.Store(s.Sectors * sectorSize)
	}
	return m.memory.fill(ram)
}
