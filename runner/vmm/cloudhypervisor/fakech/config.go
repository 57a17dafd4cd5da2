package main

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"math/bits"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// The configuration, in the order in which cloud-hypervisor writes it. What no test of ours uses is not kept, but refused.

type pciConfig struct {
	ID       *string `json:"id,omitempty"`
	IOMMU    bool    `json:"iommu,omitempty"`
	Segment  uint16  `json:"pci_segment"`
	DeviceID *uint8  `json:"pci_device_id,omitempty"`
}

type cpusConfig struct {
	Boot        uint32          `json:"boot_vcpus" need:"yes"`
	Max         uint32          `json:"max_vcpus" need:"yes"`
	Topology    json.RawMessage `json:"topology,omitempty"`
	HyperV      bool            `json:"kvm_hyperv"`
	MaxPhysBits uint8           `json:"max_phys_bits"`
	Affinity    json.RawMessage `json:"affinity,omitempty"`
	Features    struct {
		AMX bool `json:"amx"`
	} `json:"features"`
	Nested         bool   `json:"nested"`
	CoreScheduling string `json:"core_scheduling"`
	Profile        string `json:"profile"`
}

type zoneConfig struct {
	ID        string  `json:"id" need:"yes"`
	Size      uint64  `json:"size" need:"yes"`
	File      *string `json:"file,omitempty"`
	Shared    bool    `json:"shared"`
	HugePages bool    `json:"hugepages"`
	Prefault  bool    `json:"prefault"`
	Reserve   bool    `json:"reserve"`
	Mergeable bool    `json:"mergeable"`
}

type memoryConfig struct {
	Size          uint64       `json:"size" need:"yes"`
	Mergeable     bool         `json:"mergeable"`
	HotplugMethod string       `json:"hotplug_method"`
	Shared        bool         `json:"shared"`
	HugePages     bool         `json:"hugepages"`
	Prefault      bool         `json:"prefault"`
	Reserve       bool         `json:"reserve"`
	Zones         []zoneConfig `json:"zones,omitempty"`
	THP           bool         `json:"thp"`
}

func (c memoryConfig) total() uint64 {
	total := c.Size
	for _, z := range c.Zones {
		total += z.Size
	}
	return total
}

type payloadConfig struct {
	Firmware    *string `json:"firmware,omitempty"`
	Kernel      *string `json:"kernel,omitempty"`
	CommandLine *string `json:"cmdline,omitempty"`
	Initramfs   *string `json:"initramfs,omitempty"`
}

type diskConfig struct {
	pciConfig
	Path            *string         `json:"path,omitempty"`
	ReadOnly        bool            `json:"readonly"`
	Direct          bool            `json:"direct"`
	NumQueues       uint64          `json:"num_queues"`
	QueueSize       uint16          `json:"queue_size"`
	VhostUser       bool            `json:"vhost_user"`
	VhostSocket     *string         `json:"vhost_socket,omitempty"`
	RateLimiter     json.RawMessage `json:"rate_limiter_config,omitempty"`
	DisableIOUring  bool            `json:"disable_io_uring"`
	DisableAIO      bool            `json:"disable_aio"`
	Serial          *string         `json:"serial,omitempty"`
	BackingFiles    bool            `json:"backing_files"`
	Sparse          bool            `json:"sparse"`
	ImageType       imageType       `json:"image_type"`
	LockGranularity lockGranularity `json:"lock_granularity"`
}

type imageType string

func (imageType) variants() []string {
	return []string{"FixedVhd", "Qcow2", "Raw", "Vhdx", "Unknown"}
}

type lockGranularity string

func (lockGranularity) variants() []string { return []string{"ByteRange", "Full"} }

// UnmarshalJSON begins with the defaults.
func (d *diskConfig) UnmarshalJSON(b []byte) error {
	type plain diskConfig
	p := plain{NumQueues: 1, QueueSize: 128, Sparse: true, ImageType: "Unknown", LockGranularity: "ByteRange"}
	err := json.Unmarshal(b, &p)
	*d = diskConfig(p)
	return err
}

type netConfig struct {
	pciConfig
	Tap         *string         `json:"tap,omitempty"`
	IP          *string         `json:"ip,omitempty"`
	Mask        *string         `json:"mask,omitempty"`
	MAC         string          `json:"mac"`
	HostMAC     *string         `json:"host_mac,omitempty"`
	MTU         *uint16         `json:"mtu,omitempty"`
	NumQueues   uint64          `json:"num_queues"`
	QueueSize   uint16          `json:"queue_size"`
	VhostUser   bool            `json:"vhost_user"`
	VhostSocket *string         `json:"vhost_socket,omitempty"`
	VhostMode   string          `json:"vhost_mode"`
	FDs         []int           `json:"fds,omitempty"`
	RateLimiter json.RawMessage `json:"rate_limiter_config,omitempty"`
	TSO         bool            `json:"offload_tso"`
	UFO         bool            `json:"offload_ufo"`
	Checksum    bool            `json:"offload_csum"`
}

// UnmarshalJSON begins with the defaults. Numbers of descriptors that come as JSON are no descriptors.
func (n *netConfig) UnmarshalJSON(b []byte) error {
	type plain netConfig
	var mac [6]byte
	_, _ = rand.Read(mac[:]) // never fails
	mac[0] = mac[0]&^1 | 2
	p := plain{
		MAC:       fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", mac[0], mac[1], mac[2], mac[3], mac[4], mac[5]),
		NumQueues: 2, QueueSize: 256, VhostMode: "Client", TSO: true, UFO: true, Checksum: true,
	}
	err := json.Unmarshal(b, &p)
	for i := range p.FDs {
		p.FDs[i] = -1
	}
	*n = netConfig(p)
	return err
}

type rngConfig struct {
	pciConfig
	Source string `json:"src" need:"yes"`
}

type consoleMode string

func (consoleMode) variants() []string {
	return []string{"Off", "Pty", "Tty", "File", "Socket", "Null"}
}

type consoleConfig struct {
	File   *string     `json:"file,omitempty"`
	Mode   consoleMode `json:"mode" need:"yes"`
	Socket *string     `json:"socket,omitempty"`
}

type virtioConsoleConfig struct {
	consoleConfig
	pciConfig
}

type debugConsoleConfig struct {
	File   *string     `json:"file,omitempty"`
	Mode   consoleMode `json:"mode" need:"yes"`
	IOBase *uint16     `json:"iobase,omitempty"`
}

type vsockConfig struct {
	pciConfig
	CID    uint32 `json:"cid" need:"yes"`
	Socket string `json:"socket" need:"yes"`
}

type landlockConfig struct {
	Path   string `json:"path" need:"yes"`
	Access string `json:"access" need:"yes"`
}

type vmConfig struct {
	CPUs           cpusConfig          `json:"cpus"`
	Memory         memoryConfig        `json:"memory"`
	Payload        *payloadConfig      `json:"payload,omitempty"`
	Disks          []diskConfig        `json:"disks,omitempty"`
	Net            []netConfig         `json:"net,omitempty"`
	RNG            rngConfig           `json:"rng"`
	Balloon        json.RawMessage     `json:"balloon,omitempty"`
	FS             json.RawMessage     `json:"fs,omitempty"`
	Pmem           json.RawMessage     `json:"pmem,omitempty"`
	Serial         consoleConfig       `json:"serial"`
	Console        virtioConsoleConfig `json:"console"`
	DebugConsole   debugConsoleConfig  `json:"debug_console"`
	Devices        json.RawMessage     `json:"devices,omitempty"`
	Vsock          *vsockConfig        `json:"vsock,omitempty"`
	Pvpanic        bool                `json:"pvpanic"`
	IOMMU          bool                `json:"iommu"`
	Watchdog       bool                `json:"watchdog"`
	Platform       json.RawMessage     `json:"platform,omitempty"`
	LandlockEnable bool                `json:"landlock_enable"`
	LandlockRules  []landlockConfig    `json:"landlock_rules,omitempty"`
}

func parseConfig(b []byte) (*vmConfig, error) {
	iobase := uint16(0xe9)
	c := &vmConfig{
		CPUs:         cpusConfig{Boot: 1, Max: 1, MaxPhysBits: 46, Nested: true, CoreScheduling: "Vm", Profile: "Host"},
		Memory:       memoryConfig{Size: 512 << 20, HotplugMethod: "Acpi", THP: true},
		RNG:          rngConfig{Source: "/dev/urandom"},
		Serial:       consoleConfig{Mode: "Null"},
		Console:      virtioConsoleConfig{consoleConfig: consoleConfig{Mode: "Tty"}},
		DebugConsole: debugConsoleConfig{Mode: "Off", IOBase: &iobase},
	}
	if err := decode(b, c); err != nil {
		return nil, err
	}
	return c, nil
}

// validate is what is looked at when a VM is made.
func (c *vmConfig) validate() error {
	fail := func(format string, a ...any) error { return chain{fmt.Sprintf(format, a...)} }
	switch p := c.Payload; {
	case p == nil || p.Kernel == nil && p.Firmware == nil:
		return chain{"Payload configuration is not bootable", "No bootitem provided: neither firmware nor kernel"}
	case p.Kernel != nil && p.Firmware != nil:
		return chain{"Payload configuration is not bootable", "Specifying a kernel is not supported when a firmware is provided"}
	}
	if c.Payload.Kernel == nil {
		return fail("fakech: it has no firmware")
	}
	if c.Console.Mode == "File" && c.Console.File == nil || c.Serial.Mode == "File" && c.Serial.File == nil {
		return fail("Path missing when using file console mode")
	}
	if c.CPUs.Max < c.CPUs.Boot {
		return fail("Max CPUs (%d) lower than boot CPUs (%d)", c.CPUs.Max, c.CPUs.Boot)
	}
	ids := map[string]bool{}
	unique := func(id *string) error {
		switch {
		case id == nil:
		case len(*id) > 1 && (*id)[:2] == "__":
			return fail("Identifier %s is not invalid", *id) // its words
		case ids[*id]:
			return fail("Identifier %s is not unique", *id)
		default:
			ids[*id] = true
		}
		return nil
	}
	for i := range c.Disks {
		if err := c.Disks[i].validate(c); err != nil {
			return err
		}
		if err := unique(c.Disks[i].ID); err != nil {
			return err
		}
	}
	for i := range c.Net {
		if err := c.Net[i].validate(c); err != nil {
			return err
		}
		if err := unique(c.Net[i].ID); err != nil {
			return err
		}
	}
	if v := c.Vsock; v != nil {
		if v.CID < 3 || v.CID == 1<<32-1 {
			return fail("%d is a special VSOCK CID", v.CID)
		}
		if err := unique(v.ID); err != nil {
			return err
		}
	}
	for _, z := range c.Memory.Zones {
		if err := unique(&z.ID); err != nil {
			return err
		}
	}
	for _, r := range c.LandlockRules {
		if _, err := os.Stat(r.Path); err != nil {
			return fail("Path %q provided in landlock-rules does not exist", r.Path)
		}
		for _, a := range r.Access {
			if a != 'r' && a != 'w' {
				return fail("Invalid landlock access: Invalid Landlock access: Invalid access: %c", a)
			}
		}
	}
	for name, raw := range map[string]json.RawMessage{"balloon": c.Balloon, "fs": c.FS, "pmem": c.Pmem, "devices": c.Devices} {
		if raw != nil && string(raw) != "null" {
			return fail("fakech: it has no %s", name)
		}
	}
	return nil
}

func queueSize(n uint16) error {
	if n > 1<<15 || bits.OnesCount16(n) != 1 {
		return chain{fmt.Sprintf("Queue size must be a power of 2 no greater than 32768: %d", n)}
	}
	return nil
}

func (d *diskConfig) validate(c *vmConfig) error {
	if d.VhostUser || d.RateLimiter != nil {
		return chain{"fakech: it knows neither vhost-user nor rates"}
	}
	if d.NumQueues > uint64(c.CPUs.Boot) {
		return chain{fmt.Sprintf("Queue count (%d) must not exceed boot vCPUs (%d)", d.NumQueues, c.CPUs.Boot)}
	}
	if err := queueSize(d.QueueSize); err != nil {
		return err
	}
	if d.QueueSize <= 2 {
		return chain{fmt.Sprintf("Block queue size must be greater than 2: %d", d.QueueSize)}
	}
	if d.Serial != nil && len(*d.Serial) > 20 {
		return chain{fmt.Sprintf("Block device serial length (%d) exceeds maximum allowed length (20)", len(*d.Serial))}
	}
	return nil
}

func (n *netConfig) validate(c *vmConfig) error {
	fail := func(format string, a ...any) error { return chain{fmt.Sprintf(format, a...)} }
	if n.NumQueues < 2 {
		return fail("Number of queues (%d) to virtio_net should be higher than 2", n.NumQueues)
	}
	if n.FDs != nil {
		if got := uint64(len(n.FDs)) * 2; got != n.NumQueues {
			return fail("Number of queues (%d) to virtio_net does not match the number of FDs (%d)", n.NumQueues, got)
		}
		for _, fd := range n.FDs {
			if fd <= 2 {
				return fail("Reserved fd number (<= 2): %d", fd)
			}
		}
	}
	if n.NumQueues/2 > uint64(c.CPUs.Boot) {
		return fail("Queue count (%d) must not exceed boot vCPUs (%d)", n.NumQueues/2, c.CPUs.Boot)
	}
	if err := queueSize(n.QueueSize); err != nil {
		return err
	}
	if !n.Checksum && (n.TSO || n.UFO) {
		return fail(`"offload_tso" and "offload_ufo" depend on "offload_csum"`)
	}
	return nil
}

// landlock looks at the files that Landlock is to allow: it knows none that are in no file system that can be mounted, such as a memfd.
// What is not there is left out.
func (c *vmConfig) landlock() error {
	if !c.LandlockEnable {
		return nil
	}
	paths := []string{c.RNG.Source}
	for _, z := range c.Memory.Zones {
		if z.File != nil {
			paths = append(paths, *z.File)
		}
	}
	for i := range c.Disks {
		if p := c.Disks[i].Path; p != nil {
			paths = append(paths, *p)
		}
	}
	if p := c.Payload; p != nil {
		for _, path := range []*string{p.Kernel, p.Initramfs, p.Firmware} {
			if path != nil {
				paths = append(paths, *path)
			}
		}
	}
	for _, r := range c.LandlockRules {
		paths = append(paths, r.Path)
	}
	for _, p := range paths {
		if to, err := os.Readlink(p); err == nil && (strings.HasPrefix(to, "/memfd:") || strings.HasPrefix(to, "pipe:")) {
			bad := asChain(unix.EBADFD)[0]
			return chain{"Failed to apply landlock config during vm_create", "Error creating/adding/restricting ruleset", "failed to add a rule: " + bad, bad}
		}
	}
	return nil
}
