package cloudhypervisor

import (
	"fmt"
	"os"

	"github.com/coppice-dev/coppice/runner/vmm"
)

// vmConfig is cloud-hypervisor's configuration of a machine: the body of vm.create, and config.json of a restore. It is
// made from the Spec each time and never taken from a checkpoint. The ids and the order of the devices are those of
// deviceLayout.
type vmConfig struct {
	CPUs           cpuConfig      `json:"cpus"`
	Memory         memoryConfig   `json:"memory"`
	Payload        payloadConfig  `json:"payload"`
	Disks          []diskConfig   `json:"disks,omitempty"`
	Net            []netConfig    `json:"net,omitempty"`
	RNG            rngConfig      `json:"rng"`
	Vsock          vsockConfig    `json:"vsock"`
	Serial         consoleConfig  `json:"serial"`
	Console        consoleConfig  `json:"console"`
	LandlockEnable bool           `json:"landlock_enable"`
	LandlockRules  []landlockRule `json:"landlock_rules,omitempty"`
}

type cpuConfig struct {
	Boot int `json:"boot_vcpus"`
	Max  int `json:"max_vcpus"`
	// Nested virtualisation would put the state of a guest's guests into every checkpoint, and would expose a larger
	// part of the kernel to an attacker.
	Nested bool `json:"nested"`
}

type memoryConfig struct {
	Size  int64      `json:"size"` // 0: all RAM is in zones
	THP   bool       `json:"thp"`  // a huge private page would be 2 MiB of delta for one byte
	Zones []zoneConf `json:"zones"`
}

type zoneConf struct {
	ID     string `json:"id"`
	Size   int64  `json:"size"`
	File   string `json:"file"`
	Shared bool   `json:"shared"`
}

type payloadConfig struct {
	Kernel  string `json:"kernel"` // required in a restore, and not opened
	Initrd  string `json:"initramfs,omitempty"`
	Cmdline string `json:"cmdline,omitempty"`
}

type diskConfig struct {
	ID        string `json:"id"`
	Path      string `json:"path"`
	ReadOnly  bool   `json:"readonly"`
	ImageType string `json:"image_type"` // given, because with a guessed type the first sector cannot be written
	Serial    string `json:"serial"`
	Queues    int    `json:"num_queues"`
	QueueSize int    `json:"queue_size"`
}

type netConfig struct {
	ID        string `json:"id"`
	MAC       string `json:"mac"`
	FDs       []int  `json:"fds"` // says only how many there are: the descriptors come with the request
	Queues    int    `json:"num_queues"`
	QueueSize int    `json:"queue_size"`
}

type rngConfig struct {
	Source string `json:"src"`
}

type vsockConfig struct {
	ID     string `json:"id"`
	CID    int    `json:"cid"`
	Socket string `json:"socket"`
}

type consoleConfig struct {
	Mode   string `json:"mode"`
	Socket string `json:"socket,omitempty"`
}

type landlockRule struct {
	Path   string `json:"path"`
	Access string `json:"access"`
}

// The ids of the devices.
const (
	zoneID  = "mem0"
	netID   = "net0"
	vsockID = "vsock0"
)

func diskID(i int) string { return fmt.Sprintf("disk%d", i) }

// guestCID is in every machine's configuration. Nothing on the host is registered with it, and the guest's driver keeps
// it.
const guestCID = 3

// descriptors are the numbers of the VMM's inherited files in its process. The constants are the same in all processes,
// so that a successor of the runner knows them.
type descriptors struct {
	kernel, initrd int
	disks          []int
}

const (
	apiFD     = 3 + iota // listening unix socket
	eventsFD             // a FIFO
	ownFD                // the VMM's own directory, which it may write to
	restoreFD            // directory with the files for a restore, read-only for the VMM
	baseFD
	deltaFD // a memfd, used as the memory-ranges of a snapshot
	tapFD   // or a second descriptor of the base, for a machine without a network
)

// randomDevice is the VMM's source of the guest's random numbers.
const randomDevice = "/dev/urandom"

// fdPath is the path with which the VMM opens an inherited file again.
func fdPath(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }

// config returns the configuration of a machine. It is a pure function.
func config(s vmm.Spec, fd descriptors, landlock bool) vmConfig {
	size := int64(s.MemoryMiB) << 20
	c := vmConfig{
		CPUs:    cpuConfig{Boot: s.VCPUs, Max: s.VCPUs},
		Memory:  memoryConfig{Zones: []zoneConf{{ID: zoneID, Size: size, File: fdPath(baseFD)}}},
		Payload: payloadConfig{Kernel: os.DevNull},
		RNG:     rngConfig{Source: randomDevice},
		Vsock:   vsockConfig{ID: vsockID, CID: guestCID, Socket: fdPath(ownFD) + "/" + vsockSocket},
		Serial:  consoleConfig{Mode: "Socket", Socket: fdPath(ownFD) + "/" + serialSocket},
		Console: consoleConfig{Mode: "Off"},
	}
	if !s.Restore {
		c.Payload = payloadConfig{Kernel: fdPath(fd.kernel), Initrd: fdPath(fd.initrd), Cmdline: s.CommandLine}
	}
	for i, d := range s.Disks {
		c.Disks = append(c.Disks, diskConfig{
			ID: diskID(i), Path: fdPath(fd.disks[i]), ReadOnly: d.ReadOnly, ImageType: "Raw", Serial: d.Serial, Queues: 1, QueueSize: 128,
		})
	}
	if s.Tap != nil && s.Restore { // a machine that boots gets its network by vm.add-net, with the descriptor
		c.Net = []netConfig{network(s.MAC)}
	}
	if landlock {
		// Cloud-hypervisor itself allows the files in the configuration.
		c.LandlockEnable, c.LandlockRules = true, []landlockRule{{fdPath(ownFD), "rw"}}
	}
	return c
}

func network(mac string) netConfig {
	return netConfig{ID: netID, MAC: mac, FDs: []int{-1}, Queues: 2, QueueSize: 256}
}
