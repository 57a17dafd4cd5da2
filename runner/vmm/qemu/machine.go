package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
)

type state string

const (
	stateSpawned state = "spawned"
	stateWaiting state = "waiting to be restored"
	statePaused  state = "paused"
	stateRunning state = "running"
	stateFailed  state = "broken by a failed restore" // good for nothing
	stateUnknown state = "unknown"                    // a command was given up: QEMU is asked before the next
)

// commandTime bounds a monitor command whose caller gave no deadline: QEMU answers in milliseconds or is stuck.
const commandTime = 20 * time.Second

// errSilent is why a command ended that took longer.
var errSilent = core.Errorf(core.Unavailable, core.CodeVMMFailed, "the virtual machine monitor has not answered for %s: it hangs, or its host has far too much to do", commandTime)

type machine struct {
	proc    *vmmproc.Process
	qmp     *qmp
	console *console
	log     *vmmLog
	handle  vmm.Handle
	done    chan struct{} // closed after exit is set

	release  sync.Once
	released chan struct{} // closed by Release: nobody watches then

	mu     sync.Mutex // guards state, region and exit
	state  state
	region memory.Region
	exit   vmm.Exit
}

var _ vmm.Machine = (*machine)(nil)

// attach connects to the sockets of a running QEMU. The machine takes over the process and the log.
func attach(ctx context.Context, proc *vmmproc.Process, log *vmmLog, h vmm.Handle) (_ *machine, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, commandTime, errSilent)
	defer cancel()
	// A QEMU that refuses its command line ends before it accepts: do not wait for the deadline then.
	ctx, gone := context.WithCancelCause(ctx)
	defer gone(nil)
	go func() {
		select {
		case <-proc.Done():
			status, _ := proc.Status()
			gone(fmt.Errorf("%w: %s", vmm.ErrGone, status))
		case <-ctx.Done():
		}
	}()
	defer func() {
		// A dial says only that it was canceled, not why.
		if cause := context.Cause(ctx); err != nil && errors.Is(cause, vmm.ErrGone) {
			err = errors.Join(cause, err)
		}
	}()
	q, err := dialQMP(ctx, filepath.Join(h.Dir, monitorSocket))
	if err != nil {
		return nil, err
	}
	m := &machine{proc: proc, qmp: q, log: log, handle: h, done: make(chan struct{}), released: make(chan struct{})}
	if err = m.greet(ctx); err != nil {
		q.close()
		return nil, err
	}
	if m.console, err = dialConsole(ctx, filepath.Join(h.Dir, consoleSocket)); err != nil {
		q.close()
		return nil, err
	}
	go m.watch()
	return m, nil
}

// greet asks for the events that Restore waits for, for no announcements of the captured MAC after it, and for the state.
func (m *machine) greet(ctx context.Context) (err error) {
	if _, err := m.qmp.execute(ctx, "migrate-set-capabilities", map[string]any{
		"capabilities": []any{map[string]any{"capability": "events", "state": true}},
	}); err != nil {
		return err
	}
	// They come for half a second after the resume, from QEMU as RARP and from the guest, which is told to make ARP of its own:
	// past the release of a fork that was resealed in less.
	if _, err := m.qmp.execute(ctx, "migrate-set-parameters", map[string]any{"announce-rounds": 0}); err != nil {
		return err
	}
	m.state, err = m.ask(ctx)
	return err
}

// watch records the exit.
func (m *machine) watch() {
	select {
	case <-m.proc.Done():
	case <-m.released:
		return
	}
	m.console.drain()
	m.log.drain()
	status, killed := m.proc.Status()
	m.mu.Lock()
	m.exit = vmm.Exit{At: time.Now(), Killed: killed, Status: status, Console: m.console.String(), Log: m.log.end()}
	m.mu.Unlock()
	m.detach()
	close(m.done)
}

func (m *machine) Handle() vmm.Handle    { return m.handle }
func (m *machine) Console() string       { return m.console.String() }
func (m *machine) Done() <-chan struct{} { return m.done }

func (m *machine) Exit() vmm.Exit {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exit
}

func (m *machine) Release() {
	m.release.Do(func() { close(m.released) })
	m.detach()
}

func (m *machine) detach() {
	m.qmp.close()
	m.console.close()
	m.log.close()
	m.proc.Release()
}

func (m *machine) Kill(ctx context.Context) error {
	if err := m.proc.Kill(ctx); err != nil {
		return err
	}
	select {
	case <-m.done:
	case <-m.released: // nobody watches: there is nothing more to wait for
	}
	return nil
}

// gone is the error of every method once the VMM has ended.
func (m *machine) gone(verb string) error {
	select {
	case <-m.done:
		return fmt.Errorf("%s: %w", verb, vmm.ErrGone)
	default:
		return nil
	}
}

// step runs fn if the machine is in one of the states and then sets the next. It holds no lock while fn runs: the contract
// has one caller at a time change the machine.
func (m *machine) step(ctx context.Context, verb string, from []state, to state, fn func(context.Context) error) error {
	if err := m.gone(verb); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, commandTime, errSilent)
	defer cancel()
	now, err := m.known(ctx)
	if err != nil {
		return m.stepError(verb, err)
	}
	if !slices.Contains(from, now) {
		return fmt.Errorf("%s a machine that is %s: %w", verb, now, vmm.ErrState)
	}
	if err := fn(ctx); err != nil {
		m.setState(stateUnknown)
		return m.stepError(verb, err)
	}
	if to != "" {
		m.setState(to)
	}
	return nil
}

// stepError says so when the VMM ended meanwhile.
func (m *machine) stepError(verb string, err error) error {
	return fmt.Errorf("%s: %w", verb, errors.Join(err, m.gone(verb)))
}

func (m *machine) setState(s state) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state = s
}

// known returns the state, asking QEMU where a command was given up before.
func (m *machine) known(ctx context.Context) (state, error) {
	m.mu.Lock()
	now := m.state
	m.mu.Unlock()
	if now != stateUnknown {
		return now, nil
	}
	now, err := m.ask(ctx)
	if err != nil {
		return "", err
	}
	m.setState(now)
	return now, nil
}

// ask asks QEMU for the state. Whatever stops the vCPUs (a full disk, an internal error) counts as a pause: only Resume tells
// whether they can go on.
func (m *machine) ask(ctx context.Context) (state, error) {
	v, err := m.qmp.execute(ctx, "query-status", nil)
	if err != nil {
		return "", err
	}
	var status struct {
		Running bool   `json:"running"`
		Status  string `json:"status"`
	}
	if err := json.Unmarshal(v, &status); err != nil {
		return "", fmt.Errorf("query-status: %w", err)
	}
	switch {
	case status.Running:
		return stateRunning, nil
	case status.Status == "prelaunch":
		return stateSpawned, nil
	case status.Status == "inmigrate":
		return stateWaiting, nil
	default:
		return statePaused, nil
	}
}

func (m *machine) Boot(ctx context.Context) error {
	return m.step(ctx, "boot", []state{stateSpawned}, stateRunning, m.command("cont"))
}

func (m *machine) Resume(ctx context.Context) error {
	return m.step(ctx, "resume", []state{statePaused, stateRunning}, stateRunning, m.command("cont"))
}

func (m *machine) Pause(ctx context.Context) error {
	return m.step(ctx, "pause", []state{stateRunning, statePaused}, statePaused, m.command("stop"))
}

func (m *machine) command(name string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := m.qmp.execute(ctx, name, nil)
		return err
	}
}

func (m *machine) Running(ctx context.Context) (bool, error) {
	const verb = "look whether the machine runs"
	if err := m.gone(verb); err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, commandTime, errSilent)
	defer cancel()
	now, err := m.ask(ctx)
	if err != nil {
		return false, m.stepError(verb, err)
	}
	return now == stateRunning, nil
}

func (m *machine) Restore(ctx context.Context, spec vmm.RestoreSpec) error {
	began := false
	err := m.step(ctx, "restore", []state{stateWaiting}, statePaused, func(ctx context.Context) error {
		began = true
		return m.restore(ctx, spec)
	})
	if began && err != nil {
		m.setState(stateFailed)
	}
	return err
}

func (m *machine) restore(ctx context.Context, spec vmm.RestoreSpec) error {
	if spec.Inject != nil { // virtio devices read their rings from memory while they load
		r, err := m.Memory()
		if err != nil {
			return err
		}
		if err := spec.Inject(ctx, r); err != nil {
			return err
		}
	}
	// QEMU reads from the offset of the open file, which the caller's descriptor shares with those of other restores.
	own, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", spec.State.Fd()))
	if err != nil {
		return fmt.Errorf("open the device state: %w", err)
	}
	defer own.Close()
	if _, err := m.qmp.execute(ctx, "getfd", map[string]any{"fdname": "state"}, own); err != nil {
		return err
	}
	if _, err := m.qmp.execute(ctx, "migrate-incoming", map[string]any{"uri": "fd:state"}); err != nil {
		return err
	}
	return m.qmp.awaitMigration(ctx)
}

func (m *machine) SaveState(ctx context.Context, to *os.File) error {
	return m.step(ctx, "save device state of", []state{statePaused}, statePaused, func(ctx context.Context) error {
		// QEMU matches the access mode of the descriptor, so it must be write-only.
		v, err := m.qmp.execute(ctx, "add-fd", nil, to)
		if err != nil {
			return err
		}
		var set struct {
			ID int `json:"fdset-id"`
		}
		if err := json.Unmarshal(v, &set); err != nil {
			return err
		}
		_, err = m.qmp.execute(ctx, "xen-save-devices-state", map[string]any{
			"filename": fmt.Sprintf("/dev/fdset/%d", set.ID), "live": false,
		})
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), commandTime)
		defer cancel()
		_, removeErr := m.qmp.execute(clean, "remove-fd", map[string]any{"fdset-id": set.ID})
		return errors.Join(err, removeErr)
	})
}

func (m *machine) ResizeDisk(ctx context.Context, i int, size int64) error {
	return m.step(ctx, "resize a disk of", []state{stateRunning, statePaused}, "", func(ctx context.Context) error {
		_, err := m.qmp.execute(ctx, "block_resize", map[string]any{"node-name": fmt.Sprintf("disk%d", i), "size": size})
		return err
	})
}

func (m *machine) DialAgent(ctx context.Context) (net.Conn, error) {
	if err := m.gone("connect to the guest"); err != nil {
		return nil, err
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", filepath.Join(m.handle.Dir, agentSocket))
	if err != nil {
		return nil, core.Wrapf(errors.Join(err, m.gone("connect to the guest")), core.Unavailable, core.CodeGuestUnreachable, "the guest's channel does not accept a connection")
	}
	if err := m.accepted(ctx); err != nil {
		return nil, core.Wrapf(errors.Join(err, m.gone("connect to the guest"), c.Close()), core.Unavailable, core.CodeGuestUnreachable, "the guest's channel has not accepted a connection")
	}
	return c, nil
}

// accepted waits until QEMU itself, and not only the kernel, has taken a connection to a paused machine's port. The port hears nothing of
// connections during a pause: it goes on with the one that is there at the resume, and if there is none it still believes in the old one.
// What the guest writes then fails, and a port that has failed holds back all output until its connection ends: the next one, which it
// takes for the old one, stays unanswered (QEMU 7.2: virtconsole_enable_backend and flush_buf in hw/char/virtio-console.c).
func (m *machine) accepted(ctx context.Context) error {
	m.mu.Lock()
	paused := m.state == statePaused
	m.mu.Unlock()
	if !paused {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for {
		v, err := m.qmp.execute(ctx, "query-chardev", nil)
		if err != nil {
			return err
		}
		var list []struct{ Label, Filename string }
		if err := json.Unmarshal(v, &list); err != nil {
			return fmt.Errorf("query-chardev: %w", err)
		}
		for _, c := range list {
			if c.Label == agentChardev && !strings.HasPrefix(c.Filename, "disconnected:") {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-again.C:
		}
	}
}

// Memory finds the private mapping of the base: of the base's inode and as long as RAM.
func (m *machine) Memory() (memory.Region, error) {
	if err := m.gone("find the memory"); err != nil { // another process may have the pid soon
		return memory.Region{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.region.Size != 0 {
		return m.region, nil
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", m.proc.PID))
	if err != nil {
		return memory.Region{}, fmt.Errorf("%w: %w", vmm.ErrGone, err)
	}
	defer f.Close()
	size := int64(m.handle.MemoryMiB) << 20
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 5 || fields[4] != strconv.FormatUint(m.handle.BaseInode, 10) {
			continue
		}
		low, high, _ := strings.Cut(fields[0], "-")
		start, err1 := strconv.ParseUint(low, 16, 64)
		end, err2 := strconv.ParseUint(high, 16, 64)
		if errors.Join(err1, err2) != nil || int64(end-start) != size || !strings.HasSuffix(fields[1], "p") {
			continue
		}
		m.region = memory.Region{PID: m.proc.PID, Addr: start, Size: size}
		return m.region, nil
	}
	return memory.Region{}, core.Errorf(core.Internal, core.CodeVMMFailed, "process %d does not map its base: RAM cannot be found", m.proc.PID)
}
