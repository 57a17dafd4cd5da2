package main

import (
	"fmt"
	"math/bits"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// vmConfig is what the driver puts into a configuration.
type vmConfig struct {
	CPUs struct {
		Boot   int  `json:"boot_vcpus"`
		Max    int  `json:"max_vcpus"`
		Nested bool `json:"nested"`
	} `json:"cpus"`
	Memory struct {
		Size  uint64       `json:"size"`
		THP   bool         `json:"thp"`
		Zones []zoneConfig `json:"zones"`
	} `json:"memory"`
	Payload struct {
		Kernel      string `json:"kernel"`
		Initramfs   string `json:"initramfs"`
		CommandLine string `json:"cmdline"`
	} `json:"payload"`
	Disks []diskConfig `json:"disks"`
	Net   []netConfig  `json:"net"`
	RNG   struct {
		Source string `json:"src"`
	} `json:"rng"`
	Vsock struct {
		ID     string `json:"id"`
		CID    uint32 `json:"cid"`
		Socket string `json:"socket"`
	} `json:"vsock"`
	Serial         consoleConfig `json:"serial"`
	Console        consoleConfig `json:"console"`
	LandlockEnable bool          `json:"landlock_enable"`
	LandlockRules  []struct {
		Path   string `json:"path"`
		Access string `json:"access"`
	} `json:"landlock_rules"`
}

type zoneConfig struct {
	ID     string `json:"id"`
	Size   uint64 `json:"size"`
	File   string `json:"file"`
	Shared bool   `json:"shared"`
}

type diskConfig struct {
	ID        string `json:"id"`
	Path      string `json:"path"`
	ReadOnly  bool   `json:"readonly"`
	ImageType string `json:"image_type"`
	Serial    string `json:"serial"`
	NumQueues int    `json:"num_queues"`
	QueueSize int    `json:"queue_size"`
}

type netConfig struct {
	ID        string `json:"id"`
	MAC       string `json:"mac"`
	FDs       []int  `json:"fds"` // numbers that come as JSON are no descriptors
	NumQueues int    `json:"num_queues"`
	QueueSize int    `json:"queue_size"`
}

type consoleConfig struct {
	Mode   string `json:"mode"`
	Socket string `json:"socket"`
}

func parseConfig(b []byte) (*vmConfig, error) {
	c := &vmConfig{}
	return c, decode(b, c)
}

// validate is what cloud-hypervisor checks before it makes a VM.
func (c *vmConfig) validate() error {
	fail := func(format string, a ...any) error { return chain{fmt.Sprintf(format, a...)} }
	if c.Payload.Kernel == "" {
		return chain{"Payload configuration is not bootable", "No bootitem provided: neither firmware nor kernel"}
	}
	if c.CPUs.Boot < 1 || c.CPUs.Max < c.CPUs.Boot {
		return fail("Max CPUs (%d) lower than boot CPUs (%d)", c.CPUs.Max, c.CPUs.Boot)
	}
	if c.Serial.Mode != "Socket" || c.Serial.Socket == "" || c.Console.Mode != "Off" {
		return fail("fakech: it has a serial port on a socket, and no console")
	}
	ids := []string{c.Vsock.ID}
	for _, d := range c.Disks {
		if err := d.validate(c); err != nil {
			return err
		}
		ids = append(ids, d.ID)
	}
	for _, n := range c.Net {
		if err := n.validate(c); err != nil {
			return err
		}
		ids = append(ids, n.ID)
	}
	if v := c.Vsock; v.CID < 3 || v.CID == 1<<32-1 {
		return fail("%d is a special VSOCK CID", v.CID)
	}
	for _, z := range c.Memory.Zones {
		ids = append(ids, z.ID)
	}
	if err := unique(ids); err != nil {
		return err
	}
	for _, r := range c.LandlockRules {
		if _, err := os.Stat(r.Path); err != nil {
			return fail("Path %q provided in landlock-rules does not exist", r.Path)
		}
		if strings.Trim(r.Access, "rw") != "" {
			return fail("Invalid landlock access: Invalid Landlock access: Invalid access: %s", r.Access)
		}
	}
	return nil
}

func unique(ids []string) error {
	seen := map[string]bool{"": true}
	for _, id := range ids {
		if strings.HasPrefix(id, "__") {
			return chain{fmt.Sprintf("Identifier %s is not invalid", id)} // its words
		}
		if seen[id] {
			return chain{fmt.Sprintf("Identifier %s is not unique", id)}
		}
		seen[id] = true
	}
	return nil
}

func queueSize(n int) error {
	if n > 1<<15 || n < 1 || bits.OnesCount(uint(n)) != 1 {
		return chain{fmt.Sprintf("Queue size must be a power of 2 no greater than 32768: %d", n)}
	}
	return nil
}

func (d diskConfig) validate(c *vmConfig) error {
	if d.NumQueues < 1 || d.NumQueues > c.CPUs.Boot {
		return chain{fmt.Sprintf("Queue count (%d) must not exceed boot vCPUs (%d)", d.NumQueues, c.CPUs.Boot)}
	}
	if err := queueSize(d.QueueSize); err != nil {
		return err
	}
	if d.QueueSize <= 2 {
		return chain{fmt.Sprintf("Block queue size must be greater than 2: %d", d.QueueSize)}
	}
	if len(d.Serial) > 20 {
		return chain{fmt.Sprintf("Block device serial length (%d) exceeds maximum allowed length (20)", len(d.Serial))}
	}
	return nil
}

func (n netConfig) validate(c *vmConfig) error {
	fail := func(format string, a ...any) error { return chain{fmt.Sprintf(format, a...)} }
	if n.NumQueues < 2 {
		return fail("Number of queues (%d) to virtio_net should be higher than 2", n.NumQueues)
	}
	if got := len(n.FDs) * 2; got != n.NumQueues {
		return fail("Number of queues (%d) to virtio_net does not match the number of FDs (%d)", n.NumQueues, got)
	}
	for _, fd := range n.FDs {
		if fd <= 2 {
			return fail("Reserved fd number (<= 2): %d", fd)
		}
	}
	if n.NumQueues/2 > c.CPUs.Boot {
		return fail("Queue count (%d) must not exceed boot vCPUs (%d)", n.NumQueues/2, c.CPUs.Boot)
	}
	return queueSize(n.QueueSize)
}

// landlock checks the files that Landlock would have to allow: it refuses files that are in no file system that can be
// mounted, such as a memfd. A file that does not exist is left out.
func (c *vmConfig) landlock() error {
	if !c.LandlockEnable {
		return nil
	}
	paths := []string{c.RNG.Source, c.Payload.Kernel, c.Payload.Initramfs}
	for _, z := range c.Memory.Zones {
		paths = append(paths, z.File)
	}
	for _, d := range c.Disks {
		paths = append(paths, d.Path)
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
