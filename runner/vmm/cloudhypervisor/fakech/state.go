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
	"strings"
	"time"
)

// snapshotTree is state.json: a tree whose nodes have their state as a string that holds JSON.
type snapshotTree struct {
	Snapshots map[string]snapshotTree `json:"snapshots" need:"yes"`
	Data      *snapshotData           `json:"snapshot_data"`
}

type snapshotData struct {
	State string `json:"state" need:"yes"`
}

func leaf(state any) snapshotTree {
	return snapshotTree{Snapshots: map[string]snapshotTree{}, Data: &snapshotData{string(encode(state))}}
}

// to reads the state of a node.
func (s snapshotTree) to(v any) error {
	if s.Data == nil {
		return chain{"Missing snapshot data"}
	}
	if err := decode([]byte(s.Data.State), v); err != nil {
		return chain{"Error deserialising: " + err.Error()}
	}
	return nil
}

type memoryRange struct {
	GPA    uint64 `json:"gpa" need:"yes"`
	Length uint64 `json:"length" need:"yes"`
}

type rangeTable struct {
	Data []memoryRange `json:"data" need:"yes"`
}

type ramMapping struct {
	Slot       uint32 `json:"slot" need:"yes"`
	GPA        uint64 `json:"gpa" need:"yes"`
	Size       uint64 `json:"size" need:"yes"`
	ZoneID     string `json:"zone_id" need:"yes"`
	VirtioMem  bool   `json:"virtio_mem" need:"yes"`
	FileOffset uint64 `json:"file_offset" need:"yes"`
}

type archRegion struct {
	Base uint64 `json:"base" need:"yes"`
	Size uint64 `json:"size" need:"yes"`
	Type string `json:"r_type" need:"yes"`
}

type hotplugSlot struct {
	Base      uint64 `json:"base"`
	Length    uint64 `json:"length"`
	Active    bool   `json:"active"`
	Inserting bool   `json:"inserting"`
	Removing  bool   `json:"removing"`
}

type memoryState struct {
	Ranges            rangeTable    `json:"memory_ranges" need:"yes"`
	GuestRAMMappings  []ramMapping  `json:"guest_ram_mappings" need:"yes"`
	StartOfDeviceArea uint64        `json:"start_of_device_area" need:"yes"`
	BootRAM           uint64        `json:"boot_ram" need:"yes"`
	CurrentRAM        uint64        `json:"current_ram" need:"yes"`
	ArchMemRegions    []archRegion  `json:"arch_mem_regions" need:"yes"`
	HotplugSlots      []hotplugSlot `json:"hotplug_slots" need:"yes"`
	NextMemorySlot    uint32        `json:"next_memory_slot" need:"yes"`
	SelectedSlot      uint64        `json:"selected_slot" need:"yes"`
	NextHotplugSlot   uint64        `json:"next_hotplug_slot" need:"yes"`
}

func (m *memory) state(ranges []memoryRange) memoryState {
	s := memoryState{
		Ranges: rangeTable{ranges}, StartOfDeviceArea: highRAM, BootRAM: m.bootRAM, CurrentRAM: m.bootRAM,
		ArchMemRegions: []archRegion{
			{0, lowRAMEnd, "Ram"},
			{highRAM, math.MaxUint64, "Ram"},
			{lowRAMEnd, 640 << 20, "SubRegion"},
			{lowRAMEnd + 640<<20, 384 << 20, "Reserved"},
		},
		HotplugSlots: make([]hotplugSlot, 8), NextMemorySlot: m.nextSlot,
	}
	for _, r := range m.maps {
		s.GuestRAMMappings = append(s.GuestRAMMappings, ramMapping{r.slot, r.gpa, r.size, r.zone, false, r.fileOffset})
		s.StartOfDeviceArea = max(s.StartOfDeviceArea, r.gpa+r.size)
	}
	return s
}

type cpuidEntry struct {
	Function uint32 `json:"function"`
	Index    uint32 `json:"index"`
	Flags    uint32 `json:"flags"`
	EAX      uint32 `json:"eax"`
	EBX      uint32 `json:"ebx"`
	ECX      uint32 `json:"ecx"`
	EDX      uint32 `json:"edx"`
}

// clockState holds struct kvm_clock_data, byte by byte: the clock in ns, flags, the wall time and the TSC.
type clockState struct {
	KVM [48]byteNumber `json:"Kvm"`
}

// byteNumber is a byte that is written as a number.
type byteNumber uint8

const (
	clockFlags    = 8
	clockRealtime = 16
	clockTSC      = 24
)

func newClockState(uptime uint64) *clockState {
	var raw [48]byte
	binary.LittleEndian.PutUint64(raw[:], uptime)
	raw[clockFlags] = 2 | kvmClockRealtime | 8
	binary.LittleEndian.PutUint64(raw[clockRealtime:], uint64(time.Now().UnixNano()))
	binary.LittleEndian.PutUint64(raw[clockTSC:], 1<<62+uptime)
	var c clockState
	for i, b := range raw {
		c.KVM[i] = byteNumber(b)
	}
	return &c
}

// restored is the clock of a machine that goes on now: with the flag, the time since the snapshot is added.
func (c *clockState) restored() time.Duration {
	var raw [48]byte
	for i, b := range c.KVM {
		raw[i] = byte(b)
	}
	at := time.Duration(binary.LittleEndian.Uint64(raw[:]))
	if raw[clockFlags]&kvmClockRealtime != 0 {
		at += time.Since(time.Unix(0, int64(binary.LittleEndian.Uint64(raw[clockRealtime:]))))
	}
	return at
}

type vmSnapshot struct {
	Clock  *clockState  `json:"clock,omitempty"`
	Common []cpuidEntry `json:"common_cpuid" need:"yes"`
}

type msrEntry struct {
	Index uint32 `json:"index"`
	Data  uint64 `json:"data"`
}

// vcpuState has numbers that no float64 can hold.
type vcpuState struct {
	KVM struct {
		CPUID  []cpuidEntry      `json:"cpuid"`
		MSRs   []msrEntry        `json:"msrs"`
		Regs   map[string]uint64 `json:"regs"`
		LAPIC  map[string][]int8 `json:"lapic_state"`
		TSCKHz uint32            `json:"tsc_khz"`
	} `json:"Kvm"`
}

func newVCPUState(n int, uptime uint64) vcpuState {
	var s vcpuState
	s.KVM.CPUID = commonCPUID
	s.KVM.MSRs = []msrEntry{
		{0x10, 1<<63 + uptime},
		{0xc0000082, 0xffffffff81e00010},
		{0xc0000101, 0xffff888003c00000 + uint64(n)<<20},
		{0x4b564d01, 0x1ffff001},
	}
	s.KVM.Regs = map[string]uint64{"rip": 0xffffffff810a0b1f, "rsp": 0xffffffff82603e28, "rflags": 0x246, "rax": math.MaxUint64}
	s.KVM.LAPIC = map[string][]int8{"regs": make([]int8, 64)}
	s.KVM.TSCKHz = 2_500_000
	return s
}

var commonCPUID = []cpuidEntry{
	{Function: 0, EAX: 0x16, EBX: 0x756e6547, ECX: 0x6c65746e, EDX: 0x49656e69},
	{Function: 1, EAX: 0x50654, EBX: 0x800, ECX: 0xfffa3203, EDX: 0x1f8bfbff},
	{Function: 7, Flags: 1, EBX: 0xd19f4fbb, ECX: 0x818, EDX: 0xbc000400},
}

type blockState struct {
	Path     string            `json:"disk_path"`
	Sectors  uint64            `json:"disk_nsectors"`
	Avail    uint64            `json:"avail_features"`
	Acked    uint64            `json:"acked_features"`
	Geometry map[string]uint64 `json:"config"`
}

type netState struct {
	Avail     uint64         `json:"avail_features"`
	Acked     uint64         `json:"acked_features"`
	Config    map[string]any `json:"config"`
	QueueSize []uint16       `json:"queue_size"`
}

type vsockState struct {
	Avail       uint64      `json:"avail_features"`
	Acked       uint64      `json:"acked_features"`
	Connections [][2]uint32 `json:"connections"`
}

type deviceNode struct {
	ID        string           `json:"id"`
	Resources []map[string]any `json:"resources"`
	Parent    *string          `json:"parent,omitempty"`
	Children  []string         `json:"children"`
	BDF       *string          `json:"pci_bdf,omitempty"`
}

type managerState struct {
	Tree  map[string]deviceNode `json:"device_tree"`
	Count uint64                `json:"device_id_cnt"`
}

// The node that only a fake's snapshot has: a sum over all the others.
const sumNode = "_fakech"

type sumState struct {
	Sum string `json:"sum"`
}

// kvmClockRealtime is the flag of the saved clock that lets it go forward by the time since it was saved.
const kvmClockRealtime = 4

// sum is that of everything in a snapshot but the sum itself and what may be changed before a restore: the list of memory that is to be
// read, and the flag of the clock. Numbers count as they are written, the order of fields and white space do not.
func (s snapshotTree) sum() (string, error) {
	h := sha256.New()
	var add func(path string, n snapshotTree) error
	add = func(path string, n snapshotTree) error {
		fmt.Fprintf(h, "%s\n", path)
		if n.Data != nil {
			var fields any
			dec := json.NewDecoder(strings.NewReader(n.Data.State))
			dec.UseNumber()
			if err := dec.Decode(&fields); err != nil {
				return wrap(path, err)
			}
			if m, ok := fields.(map[string]any); ok {
				neutral(path, m)
			}
			h.Write(encode(fields))
		}
		for _, name := range slices.Sorted(maps.Keys(n.Snapshots)) {
			if name == sumNode {
				continue
			}
			if err := add(path+"/"+name, n.Snapshots[name]); err != nil {
				return err
			}
		}
		return nil
	}
	err := add("", s)
	return hex.EncodeToString(h.Sum(nil)), err
}

// neutral takes out what may be changed.
func neutral(path string, fields map[string]any) {
	switch path {
	case "/memory-manager":
		delete(fields, "memory_ranges")
	case "":
		clocks, _ := fields["clock"].(map[string]any)
		for _, c := range clocks {
			clock, _ := c.([]any)
			if len(clock) <= clockFlags {
				continue
			}
			number, _ := clock[clockFlags].(json.Number)
			if n, err := number.Int64(); err == nil {
				clock[clockFlags] = n &^ kvmClockRealtime
			}
		}
	}
}

// check fails when a snapshot is not what was saved. cloud-hypervisor would not know; but who has changed anything else has changed
// something that he does not know.
func (s snapshotTree) check() error {
	var was sumState
	if err := s.Snapshots["device-manager"].Snapshots[sumNode].to(&was); err != nil {
		return wrap("fakech: state.json was not made by it", err)
	}
	got, err := s.sum()
	if err != nil {
		return wrap("fakech: state.json is not what was saved", err)
	}
	if got != was.Sum {
		return chain{"fakech: state.json is not what was saved: more differs than may be changed"}
	}
	return nil
}

// dirOf is the directory of a URL.
func dirOf(url string) (string, error) {
	dir, ok := strings.CutPrefix(url, "file://")
	if !ok {
		return "", chain{"Failed to send migratable component snapshot", "Could not extract path from URL: " + url}
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return "", chain{"Failed to send migratable component snapshot", fmt.Sprintf("Destination is not a directory: %q", dir)}
	}
	return dir, nil
}

// receive reads one of the two files.
func receive(url, name, kind string) ([]byte, error) {
	dir, err := dirOf(url)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, name)
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, wrap("Failed to receive migratable component snapshot", wrap(fmt.Sprintf("Error opening VM %s snapshot file %q", kind, path), err))
	}
	return b, nil
}

func undecodable(kind string, err error) error {
	return wrap("Failed to receive migratable component snapshot", wrap("Error deserialising VM "+kind+" snapshot", err))
}
