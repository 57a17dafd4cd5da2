// Package vmm is the contract between a runner and the programs that run its virtual machines: QEMU,
// cloud-hypervisor and an in-process fake. vmm/vmmtest holds the suite that every implementation passes.
//
// A machine's RAM is always a base image mapped MAP_PRIVATE plus a delta that is written into the mapping from
// outside. A driver therefore never saves or loads RAM: it saves and loads device state, says where the mapping is,
// and calls the injector at the one moment when memory must be complete.
//
// The life of a machine, which a driver enforces with ErrState:
//
//	Spawn --Boot-----> running --Pause--> paused --Resume--> running ...
//	Spawn --Restore--> paused             paused --SaveState--> paused
//	any   --Kill-----> gone               (the VMM may also end by itself: Done is closed)
//
// Spec.Restore decides which of Boot and Restore is legal after Spawn. ResizeDisk is legal while running or paused, Memory once a
// Boot or Restore has succeeded; Running, Console, DialAgent, Handle and Exit in every state.
//
// A context that ends during Boot, Pause or Resume leaves it open whether the machine has changed: Running tells, and the
// call may be repeated. During SaveState it leaves the machine paused and the file unfit for use.
package vmm

import (
	"context"
	"net"
	"os"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
)

// ErrState is returned, wrapped, by a Machine method that is not legal in the machine's state. The call has no effect.
var ErrState = core.Errorf(core.FailedPrecondition, core.CodeStateConflict, "the virtual machine is not in a state that allows this")

// ErrWaits is returned, wrapped, by Running when a thread of the VMM waits in the kernel, for example for a page of
// memory that is not on the host yet, and the VMM therefore does not answer. The VMM is alive.
var ErrWaits = core.Errorf(core.Unavailable, core.CodeVMMFailed, "the virtual machine waits in the kernel, and will answer after that")

// ErrGone is returned, wrapped, by every Machine method once the VMM has ended.
var ErrGone = core.Errorf(core.Unavailable, core.CodeVMMFailed, "the virtual machine is gone")

// Fingerprint is everything on this host that a snapshot depends on. Two hosts can exchange snapshots if their
// fingerprints are equal.
type Fingerprint struct {
	VMM         string // "qemu", "cloud-hypervisor", "fake"
	Version     string // upstream version
	MachineType string // versioned; never an alias
	Accelerator string // "tcg", "kvm"
	CPUModel    string // model and, where the guest sees the host's CPU, a digest of its flags
	Detail      string // for people: why this accelerator
}

// Capabilities say what a caller may rely on.
type Capabilities struct {
	// ReadOnlyBase says that the driver maps a base from a read-only regular file. If it is false, the base must be a
	// frozen memfd, because the VMM opens it for writing.
	ReadOnlyBase bool
	// TapUp says that the tap must be up while the machine runs. If it is false, a tap may stay down as long as nothing
	// may leave the machine, which isolates better.
	TapUp bool
	// ResizeDisk says that a disk of a running machine can grow.
	ResizeDisk bool
	// RealGuest says that a real guest executes instructions. It is false for the fake, so that its measurements are
	// not taken for those of a VM.
	RealGuest bool
}

// Disk is one block device.
type Disk struct {
	File     *os.File
	ReadOnly bool
	Serial   string
}

// Spec is everything that a VMM process needs. The caller opens all files and closes them after Spawn has returned: a
// VMM that runs as an unprivileged user opens no path of the host. It may open its inherited files again, so files that
// it only reads must be readable by everybody; a writable disk may be given to its user.
type Spec struct {
	ID      core.SandboxID
	Cluster string // names the process for people and for reconcile
	Dir     string // private to this machine; sockets are made here. Short: a unix socket path has 107 bytes

	VCPUs     int
	MemoryMiB int
	Base      *os.File // RAM image, of exactly MemoryMiB; mapped privately, never written

	Kernel      *os.File
	Initrd      *os.File
	CommandLine string
	Disks       []Disk   // in order: root, overlay
	Tap         *os.File // nil for no network
	MAC         string   // in the device's configuration; the same at capture and restore

	NetNS *os.File // the network namespace to run in; nil for the current one
	UID   uint32   // user and group of the VMM; 0 keeps the runner's own
	GID   uint32

	CgroupFD *os.File // a cgroup v2 directory to start in; nil where there is none
	Restore  bool     // Restore will be called instead of Boot
}

// Injector writes a delta into a region before the first instruction runs.
type Injector func(ctx context.Context, r memory.Region) error

// RestoreSpec is what a machine is restored from, in addition to its base.
type RestoreSpec struct {
	State  *os.File // device state, as written by SaveState; read from its beginning, wherever its offset is; may be shared
	Inject Injector // nil if the base is already the whole memory
}

// Handle is what a successor of the runner needs to recover a machine. It is kept as JSON.
type Handle struct {
	Driver    string `json:"driver"`
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"` // clock ticks since boot, from /proc/PID/stat: tells a recycled pid
	Dir       string `json:"dir"`
	MemoryMiB int    `json:"memory_mib"`
	BaseInode uint64 `json:"base_inode"`
}

// Exit says how a VMM ended.
type Exit struct {
	At      time.Time
	Killed  bool   // by Kill
	Status  string // "exit status 1", "signal: killed"
	Console string // the last lines of the guest's console, printable
	Log     string // the last lines of the VMM's own messages, printable; empty for a recovered machine
}

// Driver starts and recovers machines of one kind. All methods are safe for concurrent use.
type Driver interface {
	// Fingerprint probes the VMM on this host. It fails, with a cure, when the VMM cannot be used.
	Fingerprint(ctx context.Context) (Fingerprint, error)
	Capabilities() Capabilities
	// Spawn starts a VMM on a base; no guest instruction has run when it returns. A cancelled context or an
	// error leaves no process and no file behind. The machine outlives ctx.
	Spawn(ctx context.Context, spec Spec) (Machine, error)
	// Recover attaches to a machine that an earlier runner process spawned, and continues the machine if that process
	// stopped it. It fails with ErrGone if that very process no longer exists; it never touches another process with the
	// same pid.
	Recover(ctx context.Context, h Handle) (Machine, error)
	// End ends a machine that an earlier runner process spawned, without any request to it, and waits until it is gone.
	// It is no error if the machine no longer exists; it never touches another process with the same pid.
	End(ctx context.Context, h Handle) error
	// Reap ends every machine on this host that any process spawned with this cluster in its Spec, except those in
	// keep. It goes on after an error, and returns how many it found.
	Reap(ctx context.Context, cluster string, keep []Handle) (int, error)
}

// Machine is one VMM process. Methods may be called from several goroutines, but one at a time changes the machine;
// Kill, Exit, Console and DialAgent may be called at any time.
type Machine interface {
	Handle() Handle
	// Boot runs the kernel from its first instruction.
	Boot(ctx context.Context) error
	// Restore injects memory, loads device state and leaves the machine paused. After an error only Kill is legal.
	Restore(ctx context.Context, spec RestoreSpec) error
	// Pause stops every vCPU and drains block I/O. Idempotent.
	Pause(ctx context.Context) error
	// Resume lets the vCPUs run. Idempotent.
	Resume(ctx context.Context) error
	// SaveState writes the device state of a paused machine, without memory and disks. The file is empty and open only
	// for writing. After an error, for example because of a full disk, the machine is still paused.
	SaveState(ctx context.Context, to *os.File) error
	// Memory says where RAM is mapped. The Injector of a restore gets this earlier, as soon as there is a mapping.
	Memory() (memory.Region, error)
	// ResizeDisk grows disk number i to size bytes; the guest is told. The file has that size already.
	ResizeDisk(ctx context.Context, i int, size int64) error
	// DialAgent opens the byte stream to the guest agent. Callers have one connection at a time. Drivers differ in
	// whether they refuse, delay or answer a second one; it never disturbs the first. The guest gets a connection to a
	// paused machine when it is resumed. If a connection ends during a pause, there must be another one before the
	// resume. A connection to a machine that was just restored may break off: a clone's connection can have the same
	// addresses as one that its parent was closing at the capture, and what the guest still sends about that one ends
	// the clone's. The next connection is not affected.
	DialAgent(ctx context.Context) (net.Conn, error)
	// Console returns the printable tail of the guest's console, at most ConsoleBytes.
	Console() string
	// Running asks the VMM whether the vCPUs run.
	Running(ctx context.Context) (bool, error)
	// Done is closed when the VMM process has ended, for whatever reason.
	Done() <-chan struct{}
	// Exit says how it ended; the zero value before Done is closed.
	Exit() Exit
	// Stop makes the kernel stop the VMM's process, whatever the process is doing; it needs no answer from the VMM. A
	// thread in a page fault stops when it has its page. Until Continue, only Kill, Exit, Console, Memory and Handle are
	// useful. Both are idempotent.
	Stop() error
	Continue() error
	// Kill ends the VMM and waits until it is gone. Idempotent. After it nothing of the machine is left but Dir.
	Kill(ctx context.Context) error
	// Release detaches from the machine without ending it, for a runner that stops. The Machine must not be used any
	// more.
	Release()
}
