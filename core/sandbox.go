package core

import (
	"net/netip"
	"regexp"
	"time"
)

// Resources is the shape of a sandbox. VCPUs and MemoryMiB are part of a snapshot and never change for a
// workspace; DiskGiB is the size of its writable overlay.
type Resources struct {
	VCPUs     int `json:"vcpus"`
	MemoryMiB int `json:"memory_mib"`
	DiskGiB   int `json:"disk_gib"`
}

// The bounds of Resources. Memory is a multiple of 2 MiB so that every VMM accepts it.
const (
	MinVCPUs     = 1
	MaxVCPUs     = 64
	MinMemoryMiB = 128
	MaxMemoryMiB = 256 * 1024
	MinDiskGiB   = 1
	MaxDiskGiB   = 1024
)

// Validate checks the bounds.
func (r Resources) Validate() error {
	switch {
	case r.VCPUs < MinVCPUs || r.VCPUs > MaxVCPUs:
		return Errorf(Invalid, CodeInvalidField, "resources.vcpus is %d; it must be between %d and %d", r.VCPUs, MinVCPUs, MaxVCPUs)
	case r.MemoryMiB < MinMemoryMiB || r.MemoryMiB > MaxMemoryMiB || r.MemoryMiB%2 != 0:
		return Errorf(Invalid, CodeInvalidField, "resources.memory_mib is %d; it must be even and between %d and %d", r.MemoryMiB, MinMemoryMiB, MaxMemoryMiB)
	case r.DiskGiB < MinDiskGiB || r.DiskGiB > MaxDiskGiB:
		return Errorf(Invalid, CodeInvalidField, "resources.disk_gib is %d; it must be between %d and %d", r.DiskGiB, MinDiskGiB, MaxDiskGiB)
	}
	return nil
}

// EgressPolicy is the named mode of a workspace's outbound network.
type EgressPolicy string

// The egress policies.
const (
	// EgressDenyAll is the default: nothing leaves the sandbox.
	EgressDenyAll EgressPolicy = "deny-all"
	// EgressProxied is the form of deny-all on a runner with an egress proxy: only the proxy's traffic leaves. It is
	// not a policy of a workspace; only runners use it.
	EgressProxied EgressPolicy = "proxied"
	// EgressAllowAll routes everything out. It exists for development. It is exempt from invariant 2, and says so.
	EgressAllowAll EgressPolicy = "allow-all"
)

// Identity is what a sandbox gets at every restore and shares with no other sandbox.
type Identity struct {
	Generation string     `json:"generation"` // random, never derived from a clock; names this restore for ever
	Hostname   string     `json:"hostname"`
	MachineID  string     `json:"machine_id"` // 32 hex digits
	MAC        string     `json:"mac"`
	IP         netip.Addr `json:"ip"`
}

// ResealStatus is the outcome of one reseal step.
type ResealStatus string

// The outcomes of a reseal step.
const (
	ResealOK      ResealStatus = "ok"
	ResealSkipped ResealStatus = "skipped" // does not apply to this guest; Evidence says why
	ResealFailed  ResealStatus = "failed"
)

// ResealStep is one thing that was renewed, with its evidence.
type ResealStep struct {
	Name       string            `json:"name"`
	Status     ResealStatus      `json:"status"`
	DurationMS float64           `json:"duration_ms"`
	Evidence   map[string]string `json:"evidence,omitempty"`
	Error      string            `json:"error,omitempty"`
}

// StaleProcess is a process that was running at the capture and whose own random generator the platform cannot
// reseed: it must use a reseal hook or be restarted.
type StaleProcess struct {
	PID     int    `json:"pid"`
	Command string `json:"command"`
	Runtime string `json:"runtime"` // openssl, node, java, python, go
}

// WorkloadProcess is a process of the workload at a capture. Within one boot of a guest, which all checkpoints of a
// tree share, its number, start and command identify it.
type WorkloadProcess struct {
	PID        int    `json:"pid"`         // as the workload sees it
	StartTicks uint64 `json:"start_ticks"` // since the guest's boot, in hundredths of a second
	Command    string `json:"command"`
	Args       string `json:"args,omitempty"` // clipped
}

// ResealReport says what was renewed in a fork. A sandbox is released only if Complete.
type ResealReport struct {
	Generation     string         `json:"generation"`
	Complete       bool           `json:"complete"`
	Steps          []ResealStep   `json:"steps"`
	StaleProcesses []StaleProcess `json:"stale_prng_processes"`
	DurationMS     float64        `json:"duration_ms"`
}

// Timing is one named stage of an operation, in the order in which stages ended.
type Timing struct {
	Stage      string  `json:"stage"`
	DurationMS float64 `json:"duration_ms"`
}

// Stopwatch collects the timings of one operation. It is not safe for concurrent use.
type Stopwatch struct {
	last time.Time
	list []Timing
}

// NewStopwatch starts a stopwatch.
func NewStopwatch() *Stopwatch { return &Stopwatch{last: time.Now()} }

// Lap ends a stage that began where the one before it ended.
func (w *Stopwatch) Lap(stage string) {
	now := time.Now()
	w.list = append(w.list, Timing{Stage: stage, DurationMS: Milliseconds(now.Sub(w.last))})
	w.last = now
}

// Add records a stage that was measured elsewhere.
func (w *Stopwatch) Add(stage string, d time.Duration) {
	w.list = append(w.list, Timing{Stage: stage, DurationMS: Milliseconds(d)})
}

// Timings returns what was collected.
func (w *Stopwatch) Timings() []Timing { return w.list }

// Milliseconds converts a duration for a report, to a microsecond.
func Milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

var nameForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// ValidateName checks a name that a user gave to the named field.
func ValidateName(field, name string) error {
	if !nameForm.MatchString(name) {
		return Errorf(Invalid, CodeInvalidName, "%s %q must be 1 to 63 lower-case letters, digits or hyphens and begin and end with a letter or digit", field, Clip(name))
	}
	return nil
}
