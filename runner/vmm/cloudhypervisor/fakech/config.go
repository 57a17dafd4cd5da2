package main

import (
	"fmt"
	"math/bits"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// The configuration, as far as the driver writes it. The driver leaves no default to cloud-hypervisor.

type vmConfig struct {
	CPUs           cpusConfig       `json:"cpus"`
	Memory         memoryConfig     `json:"memory"`
	Payload        *payloadConfig   `json:"payload,omitempty"`
	Disks          []diskConfig     `json:"disks,omitempty"`
	Net            []netConfig      `json:"net,omitempty"`
	RNG            rngConfig        `json:"rng"`
	Serial         consoleConfig    `json:"serial"`
	Console        consoleConfig    `json:"console"`
	Vsock          *vsockConfig     `json:"vsock,omitempty"`
	LandlockEnable bool             `json:"landlock_enable"`
	LandlockRules  []landlockConfig `json:"landlock_rules,omitempty"`
}

type cpusConfig struct {
	Boot   int  `json:"boot_vcpus"`
	Max    int  `json:"max_vcpus"`
	Nested bool `json:"nested"`
}

type memoryConfig struct {
	Size  uint64       `json:"size"`
	Zones []zoneConfig `json:"zones"`
	THP   bool         `json:"thp"`
}

type zoneConfig struct {
	ID     string `json:"id"`
	Size   uint64 `json:"size"`
	File   string `json:"file"`
	Shared bool   `json:"shared"`
}

type payloadConfig struct {
	Kernel      string `json:"kernel"`
	CommandLine string `json:"cmdline,omitempty"`
	Initramfs   string `json:"initramfs,omitempty"`
}

type diskConfig struct {
	ID        string `json:"id"`
	Path      string `json:"path"`
	ReadOnly  bool   `json:"readonly"`
	ImageType string `json:"image_type"`
	Serial    string `json:"serial"`
	NumQueues int    `json:"num_queues"`
	QueueSize uint   `json:"queue_size"`
}

type netConfig struct {
	ID        string `json:"id"`
	MAC       string `json:"mac"`
	FDs       []int  `json:"fds,omitempty"` // numbers that come as JSON say only how many there are
	NumQueues int    `json:"num_queues"`
	QueueSize uint   `json:"queue_size"`
}

type rngConfig struct {
	Source string `json:"src"`
}

type consoleConfig struct {
	Mode   string `json:"mode"`
	Socket string `json:"socket,omitempty"`
}

type vsockConfig struct {
	ID     string `json:"id"`
	CID    uint32 `json:"cid"`
	Socket string `json:"socket"`
}

type landlockConfig struct {
	Path   string `json:"path"`
	Access string `json:"access"`
}

// ram is how much there is, in bytes.
func (c *vmConfig) ram() uint64 {
	total := c.Memory.Size
	for _, z := range c.Memory.Zones {
		total += z.Size
	}
	return total
}

// rule is a sentence about a configuration that cannot be used.
type rule struct {
	broken bool
	words  string
}

// first is the error of the first rule that is broken.
func first(rules []rule) error {
	for _, r := range rules {
		if r.broken {
			return chain{r.words}
		}
	}
	return nil
}

// validate is what is looked at when a VM is made.
func (c *vmConfig) validate() error {
	if c.Payload == nil || c.Payload.Kernel == "" {
		return chain{"Payload configuration is not bootable", "No bootitem provided: neither firmware nor kernel"}
	}
	rules := []rule{
		{c.CPUs.Boot < 1, "fakech: it wants a vCPU"},
		{c.CPUs.Max < c.CPUs.Boot, fmt.Sprintf("Max CPUs (%d) lower than boot CPUs (%d)", c.CPUs.Max, c.CPUs.Boot)},
		{c.Memory.Size != 0 || len(c.Memory.Zones) != 1, "fakech: it has RAM in one zone"},
		{c.Serial.Mode != "Socket" || c.Console.Mode != "Off", "fakech: its console is a serial port on a socket"},
		{c.Vsock == nil, "fakech: it wants a vsock"},
	}
	if err := first(rules); err != nil {
		return err
	}
	z := c.Memory.Zones[0]
	rules = []rule{
		{z.Shared || z.File == "", "fakech: its zone has a file, which it maps privately"},
		{z.Size == 0 || z.Size%pageSize != 0, "Memory size is misaligned with default page size or its hugepage size"},
		{c.Vsock.CID < 3 || c.Vsock.CID == 1<<32-1, fmt.Sprintf("%d is a special VSOCK CID", c.Vsock.CID)},
	}
	ids := map[string]bool{}
	for _, id := range append(c.devices(), z.ID) {
		rules = append(rules,
			rule{id == "", "fakech: it wants a name for everything"},
			rule{strings.HasPrefix(id, "__"), fmt.Sprintf("Identifier %s is not invalid", id)}, // its words
			rule{ids[id], fmt.Sprintf("Identifier %s is not unique", id)})
		ids[id] = true
	}
	for i := range c.Disks {
		rules = append(rules, c.Disks[i].rules(c)...)
	}
	for i := range c.Net {
		rules = append(rules, c.Net[i].rules(c)...)
	}
	for _, r := range c.LandlockRules {
		_, err := os.Stat(r.Path)
		rules = append(rules,
			rule{err != nil, fmt.Sprintf("Path %q provided in landlock-rules does not exist", r.Path)},
			rule{strings.Trim(r.Access, "rw") != "", "Invalid landlock access: Invalid Landlock access: Invalid access: " + r.Access})
	}
	return first(rules)
}

// devices are the names of those that have a state.
func (c *vmConfig) devices() (ids []string) {
	for i := range c.Disks {
		ids = append(ids, c.Disks[i].ID)
	}
	for i := range c.Net {
		ids = append(ids, c.Net[i].ID)
	}
	return append(ids, c.Vsock.ID)
}

func queues(n, vcpus int, size uint) []rule {
	return []rule{
		{n > vcpus, fmt.Sprintf("Queue count (%d) must not exceed boot vCPUs (%d)", n, vcpus)},
		{size > 1<<15 || bits.OnesCount(size) != 1, fmt.Sprintf("Queue size must be a power of 2 no greater than 32768: %d", size)},
	}
}

func (d *diskConfig) rules(c *vmConfig) []rule {
	return append(queues(d.NumQueues, c.CPUs.Boot, d.QueueSize), []rule{
		{d.NumQueues < 1, "fakech: a disk wants a queue"},
		{d.QueueSize <= 2, fmt.Sprintf("Block queue size must be greater than 2: %d", d.QueueSize)},
		{len(d.Serial) > 20, fmt.Sprintf("Block device serial length (%d) exceeds maximum allowed length (20)", len(d.Serial))},
		{d.ImageType != "Raw", fmt.Sprintf("fakech: it has disks of the type Raw only, not %q", d.ImageType)},
	}...)
}

func (n *netConfig) rules(c *vmConfig) []rule {
	got := 2 * len(n.FDs)
	rules := append(queues(n.NumQueues/2, c.CPUs.Boot, n.QueueSize), []rule{
		{n.NumQueues < 2, fmt.Sprintf("Number of queues (%d) to virtio_net should be higher than 2", n.NumQueues)},
		{got == 0, "fakech: it takes taps as descriptors only"},
		{got != n.NumQueues, fmt.Sprintf("Number of queues (%d) to virtio_net does not match the number of FDs (%d)", n.NumQueues, got)},
	}...)
	for _, fd := range n.FDs {
		rules = append(rules, rule{fd <= 2, fmt.Sprintf("Reserved fd number (<= 2): %d", fd)})
	}
	return rules
}

// landlock looks at the files that Landlock is to allow: it knows none that are in no file system that can be mounted, such as a memfd.
// What is not there is left out.
func (c *vmConfig) landlock() error {
	if !c.LandlockEnable {
		return nil
	}
	paths := []string{c.RNG.Source}
	for _, z := range c.Memory.Zones {
		paths = append(paths, z.File)
	}
	for i := range c.Disks {
		paths = append(paths, c.Disks[i].Path)
	}
	if p := c.Payload; p != nil {
		paths = append(paths, p.Kernel, p.Initramfs)
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
