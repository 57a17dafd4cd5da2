package report

import (
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm/qemu"
)

// Host is the machine on which the figures were measured.
type Host struct {
	Kernel      string  `json:"kernel"`
	CPU         string  `json:"cpu"`
	CPUs        int     `json:"cpus"`
	MemoryGiB   float64 `json:"memory_gib"`
	VMM         string  `json:"vmm"`
	VMMVersion  string  `json:"vmm_version"`
	Accelerator string  `json:"accelerator"`
	Why         string  `json:"why"`       // what decided that
	CPUModel    string  `json:"cpu_model"` // the guest's
	Scan        string  `json:"scan"`      // how private pages are found
	Volume      string  `json:"volume"`
	Image       string  `json:"image"`
	GuestKernel string  `json:"guest_kernel"`
}

// ReportName is the file of the report: those of different VMMs and accelerators lie side by side.
func (h Host) ReportName() string { return "report-" + h.VMM + "-" + h.Accelerator + ".json" }

// HasAims reports whether the aims are meant for what was measured on: they were set for QEMU under TCG.
func (h Host) HasAims() bool { return h.VMM == qemu.DriverName && h.Accelerator == "tcg" }

// Machines is what the machines ran on.
func (h Host) Machines() string {
	return fmt.Sprintf("%s %s, %s, guest CPU %s", h.VMM, h.VMMVersion, h.Accelerator, h.CPUModel)
}

// load is what else the host did.
type load struct {
	Before float64 `json:"before"` // load average of one minute
	After  float64 `json:"after"`  // the run's own load included
	Note   string  `json:"note"`
}

func describeHost() Host {
	h := Host{CPUs: runtime.NumCPU(), CPU: cpuName(), Scan: string(memory.ScanMethod())}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		h.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	var mem unix.Sysinfo_t
	if unix.Sysinfo(&mem) == nil {
		h.MemoryGiB = float64(mem.Totalram*uint64(mem.Unit)) / (1 << 30)
	}
	return h
}

func cpuName() string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

// loadAverage is that of the last minute; 0 where it cannot be read.
func loadAverage() float64 {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	var one float64
	if _, err := fmt.Sscan(string(b), &one); err != nil {
		return 0
	}
	return one
}
