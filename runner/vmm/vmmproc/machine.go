package vmmproc

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/threads"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// State is the state of a machine, as in package vmm.
type State string

// The states.
const (
	Spawned State = "spawned"
	Waiting State = "waiting to be restored"
	Paused  State = "paused"
	Running State = "running"
	Failed  State = "broken by a failed restore" // only Kill is useful
	Unknown State = "unknown"                    // a command was abandoned: the VMM is asked before the next one
)

// CommandTime bounds a command to a VMM whose caller gave no deadline: it answers in milliseconds or is stuck.
const CommandTime = 20 * time.Second

// ErrSilent is the error of a command that took longer than CommandTime.
var ErrSilent = core.Errorf(core.Unavailable, core.CodeVMMFailed, "the virtual machine monitor has not answered for %s: it hangs, or its host has far too much to do", CommandTime)

// Machine is the common part of the machines of every driver whose VMM is a process: its life, its state, the place of
// its memory, and its end. A driver embeds it.
type Machine struct {
	Proc *Process
	Log  *Log

	handle  vmm.Handle
	console *Console
	hooks   Hooks
	done    chan struct{} // closed after exit is set

	release  sync.Once
	released chan struct{} // closed by Release; then nobody watches

	mu     sync.Mutex // guards the fields below
	state  State
	region memory.Region
	exit   vmm.Exit
	cause  string // why the driver itself ended it
	asked  bool   // Kill was called
}

// Hooks are the parts that differ between VMMs.
type Hooks struct {
	// Ask asks the VMM for the state.
	Ask func(ctx context.Context) (State, error)
	// Detach closes the driver's connections to the VMM. It may be called several times.
	Detach func()
}

// NewMachine takes over a process in a state, with its log and console. Watch must be called when the machine is
// complete.
func NewMachine(proc *Process, log *Log, console *Console, h vmm.Handle, hooks Hooks) *Machine {
	return &Machine{
		Proc: proc, Log: log, handle: h, console: console, hooks: hooks, state: Unknown,
		done: make(chan struct{}), released: make(chan struct{}),
	}
}

// Watch records the exit. It runs until the process has ended or Release.
func (m *Machine) Watch() {
	select {
	case <-m.Proc.Done():
	case <-m.released:
		return
	}
	m.console.Drain()
	m.Log.Drain()
	status, killed := m.Proc.Status()
	m.mu.Lock()
	if m.cause != "" && !m.asked {
		status, killed = m.cause, false
	}
	m.exit = vmm.Exit{At: time.Now(), Killed: killed, Status: status, Console: m.console.String(), Log: m.Log.End()}
	m.mu.Unlock()
	m.detach()
	close(m.done)
}

// Handle implements vmm.Machine.
func (m *Machine) Handle() vmm.Handle { return m.handle }

// Follow reads what the guest prints from a connection.
func (m *Machine) Follow(c net.Conn) { m.console.Follow(c) }

// Console implements vmm.Machine.
func (m *Machine) Console() string { return m.console.String() }

// Done implements vmm.Machine.
func (m *Machine) Done() <-chan struct{} { return m.done }

// Exit implements vmm.Machine.
func (m *Machine) Exit() vmm.Exit {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exit
}

// Release implements vmm.Machine.
func (m *Machine) Release() {
	m.release.Do(func() { close(m.released) })
	m.detach()
}

// Released is closed by Release.
func (m *Machine) Released() <-chan struct{} { return m.released }

func (m *Machine) detach() {
	m.hooks.Detach()
	m.console.Close()
	m.Log.Close()
	m.Proc.Release()
}

// Stop implements vmm.Machine.
func (m *Machine) Stop() error {
	if err := m.signal("stop", unix.SIGSTOP); err != nil {
		return err
	}
	// Its threads are named by numbers. If the process was killed and reaped meanwhile, other threads may have these
	// numbers.
	if start, err := startTime(m.Proc.PID); err != nil || start != m.Proc.StartTime {
		return fmt.Errorf("stop: %w", vmm.ErrGone)
	}
	return threads.Stop(m.Proc.PID)
}

// Continue implements vmm.Machine.
func (m *Machine) Continue() error { return m.signal("continue", unix.SIGCONT) }

func (m *Machine) signal(verb string, s unix.Signal) error {
	if err := m.Gone(verb); err != nil {
		return err
	}
	if err := m.Proc.Signal(s); err != nil {
		return fmt.Errorf("%s process %d: %w", verb, m.Proc.PID, err)
	}
	return nil
}

// Kill implements vmm.Machine.
func (m *Machine) Kill(ctx context.Context) error {
	m.mu.Lock()
	m.asked = true
	m.mu.Unlock()
	return m.kill(ctx)
}

// EndFor ends the machine for a reason that its VMM does not know. The reason becomes the status of its exit.
func (m *Machine) EndFor(ctx context.Context, cause string) error {
	m.mu.Lock()
	if m.cause == "" {
		m.cause = cause
	}
	m.mu.Unlock()
	return m.kill(ctx)
}

func (m *Machine) kill(ctx context.Context) error {
	if err := m.Proc.Kill(ctx); err != nil {
		return err
	}
	select {
	case <-m.done:
	case <-m.released: // nobody watches: there is nothing more to wait for
	}
	return nil
}

// Gone is the error of every method once the VMM has ended.
func (m *Machine) Gone(verb string) error {
	select {
	case <-m.done:
		return fmt.Errorf("%s: %w", verb, vmm.ErrGone)
	default:
		return nil
	}
}

// Step runs fn if the machine is in one of the states from, and then sets the state to; "" keeps the state. It holds no
// lock while fn runs: by the contract, only one caller at a time changes the machine.
func (m *Machine) Step(ctx context.Context, verb string, from []State, to State, fn func(context.Context) error) error {
	if err := m.Gone(verb); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, CommandTime, ErrSilent)
	defer cancel()
	now, err := m.known(ctx)
	if err != nil {
		return m.stepError(verb, err)
	}
	if !slices.Contains(from, now) {
		return fmt.Errorf("%s a machine that is %s: %w", verb, now, vmm.ErrState)
	}
	if err := fn(ctx); err != nil {
		m.SetState(Unknown)
		return m.stepError(verb, err)
	}
	if to != "" {
		m.SetState(to)
	}
	return nil
}

// StepRestore is Step for a restore: after a restore that began and failed, the machine is useless.
func (m *Machine) StepRestore(ctx context.Context, fn func(context.Context) error) error {
	began := false
	err := m.Step(ctx, "restore", []State{Waiting}, Paused, func(ctx context.Context) error {
		began = true
		return fn(ctx)
	})
	if began && err != nil {
		m.SetState(Failed)
	}
	return err
}

// stepError adds to an error that the VMM ended meanwhile.
func (m *Machine) stepError(verb string, err error) error {
	return fmt.Errorf("%s: %w", verb, errors.Join(err, m.Gone(verb)))
}

// State returns the last known state.
func (m *Machine) State() State {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state
}

// SetState sets it.
func (m *Machine) SetState(s State) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state = s
}

// known returns the state, and asks the VMM if a command was abandoned before.
func (m *Machine) known(ctx context.Context) (State, error) {
	if now := m.State(); now != Unknown {
		return now, nil
	}
	now, err := m.hooks.Ask(ctx)
	if err != nil {
		return "", err
	}
	m.SetState(now)
	return now, nil
}

// Running implements vmm.Machine.
func (m *Machine) Running(ctx context.Context) (bool, error) {
	const verb = "look whether the machine runs"
	if err := m.Gone(verb); err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, CommandTime, ErrSilent)
	defer cancel()
	var now State
	if err := m.Proc.Answers(ctx, func(ctx context.Context) (err error) {
		now, err = m.hooks.Ask(ctx)
		return err
	}); err != nil {
		return false, m.stepError(verb, err)
	}
	return now == Running, nil
}

// Memory finds the private mapping of the base: the parts of the base's inode that together have the length of RAM.
func (m *Machine) Memory() (memory.Region, error) {
	if err := m.Gone("find the memory"); err != nil { // another process may get the pid soon
		return memory.Region{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.region.Size != 0 {
		return m.region, nil
	}
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", m.Proc.PID))
	if err != nil {
		return memory.Region{}, fmt.Errorf("%w: %w", vmm.ErrGone, err)
	}
	defer maps.Close()
	parts, size := privateMappings(bufio.NewScanner(maps), m.handle.BaseInode)
	switch {
	case size == 0:
		return memory.Region{}, fmt.Errorf("find the memory of process %d, which does not map its base: %w", m.Proc.PID, vmm.ErrState)
	case size != int64(m.handle.MemoryMiB)<<20:
		return memory.Region{}, core.Errorf(core.Internal, core.CodeVMMFailed, "process %d maps %d bytes of its base, not all of its %d MiB: RAM cannot be found", m.Proc.PID, size, m.handle.MemoryMiB)
	}
	m.region = memory.Region{PID: m.Proc.PID, Size: size, Parts: parts}
	return m.region, nil
}

// privateMappings reads lines of /proc/PID/maps. It returns the private mappings of an inode by their offsets in the
// file, and the size that they cover from its beginning without a gap. Mappings that are neighbours in both count as
// one part, because the kernel may show one mapping in pieces.
func privateMappings(lines *bufio.Scanner, inode uint64) (parts []memory.Part, size int64) {
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 5 || fields[4] != strconv.FormatUint(inode, 10) || !strings.HasSuffix(fields[1], "p") {
			continue
		}
		low, high, _ := strings.Cut(fields[0], "-")
		start, err1 := strconv.ParseUint(low, 16, 64)
		end, err2 := strconv.ParseUint(high, 16, 64)
		offset, err3 := strconv.ParseInt(fields[2], 16, 64)
		if errors.Join(err1, err2, err3) != nil {
			continue
		}
		parts = append(parts, memory.Part{Offset: offset, Addr: start, Size: int64(end - start)})
	}
	slices.SortFunc(parts, func(a, b memory.Part) int { return int(a.Offset/memory.PageSize - b.Offset/memory.PageSize) })
	joined := parts[:0]
	for _, p := range parts {
		if p.Offset != size {
			return nil, size
		}
		size += p.Size
		if n := len(joined); n > 0 && joined[n-1].Addr+uint64(joined[n-1].Size) == p.Addr {
			joined[n-1].Size += p.Size
			continue
		}
		joined = append(joined, p)
	}
	return joined, size
}
