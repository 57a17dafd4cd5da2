package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
)

type machine struct {
	*vmmproc.Machine

	dialing chan struct{} // of size 1; full while a goroutine connects to the monitor

	mu     sync.Mutex // guards the fields below
	qmp    *qmp       // nil until the monitor has answered; see monitor
	closed bool       // no further connections are made
}

var _ vmm.Machine = (*machine)(nil)

// attach connects to the sockets of a running QEMU. The machine takes over the process and the log.
func attach(ctx context.Context, proc *vmmproc.Process, log *vmmproc.Log, h vmm.Handle) (_ *machine, err error) {
	ctx, explain, stop := vmmproc.Attaching(ctx, proc)
	defer stop()
	defer func() { err = explain(err) }()
	m := newMachine(proc, log, h)
	if _, err := m.monitor(ctx); err != nil {
		return nil, err
	}
	if err := m.follow(ctx); err != nil {
		m.disconnect()
		return nil, err
	}
	go m.Watch()
	return m, nil
}

// reattach is attach to a QEMU that an earlier runner started. If the main thread of that QEMU
// waits for a page, QEMU answers nothing until the page comes. reattach returns the machine all the
// same, because each command connects first.
func reattach(ctx context.Context, proc *vmmproc.Process, h vmm.Handle) (_ *machine, err error) {
	ctx, explain, stop := vmmproc.Attaching(ctx, proc)
	defer stop()
	defer func() { err = explain(err) }()
	m := newMachine(proc, vmmproc.NoLog(), h)
	if err := proc.Answers(ctx, func(ctx context.Context) error { _, err := m.monitor(ctx); return err }); err != nil && !errors.Is(err, vmm.ErrWaits) {
		m.disconnect()
		return nil, err
	}
	go m.Watch()
	go m.followLate() //nolint:gosec // outlives the takeover, and ends with the machine
	return m, nil
}

func newMachine(proc *vmmproc.Process, log *vmmproc.Log, h vmm.Handle) *machine {
	m := &machine{dialing: make(chan struct{}, 1)}
	m.Machine = vmmproc.NewMachine(proc, log, vmmproc.NewConsole(), h, vmmproc.Hooks{Ask: m.ask, Detach: m.disconnect})
	return m
}

// follow reads the guest's console.
func (m *machine) follow(ctx context.Context) error {
	printed, err := dial(ctx, filepath.Join(m.Handle().Dir, consoleSocket))
	if err != nil {
		return err
	}
	m.Follow(printed)
	return nil
}

// followLate follows the console of an adopted QEMU, as soon as the console accepts a connection. The console's output
// is only for people; the takeover does not depend on it.
func (m *machine) followLate() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-m.Done():
		case <-m.Released():
		case <-ctx.Done():
		}
		cancel()
	}()
	_ = m.follow(ctx) // without it the console stays empty
}

// dial connects to a socket of QEMU. The queue of the socket has room for two connections that QEMU
// has not taken yet. A QEMU that waits for a page takes none, so the connections of runners that
// have ended stay in the queue until the page comes.
func dial(ctx context.Context, path string) (net.Conn, error) {
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		var d net.Dialer
		c, err := d.DialContext(ctx, "unix", path)
		if !errors.Is(err, unix.EAGAIN) {
			return c, err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("it takes no further connection: %w", context.Cause(ctx))
		}
	}
}

// monitor returns the connection to the monitor, and makes it if there is none.
func (m *machine) monitor(ctx context.Context) (*qmp, error) {
	select {
	case m.dialing <- struct{}{}:
		defer func() { <-m.dialing }()
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the monitor: %w", context.Cause(ctx))
	}
	m.mu.Lock()
	q, closed := m.qmp, m.closed
	m.mu.Unlock()
	if closed {
		return nil, vmm.ErrGone
	}
	if q != nil && !q.over() {
		return q, nil
	}
	last := q
	q, err := dialQMP(ctx, filepath.Join(m.Handle().Dir, monitorSocket))
	if err != nil && last != nil {
		return nil, errors.Join(last.cause(), err)
	}
	if err != nil {
		return nil, err
	}
	if err := m.greet(ctx, q); err != nil {
		q.close()
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		q.close()
		return nil, vmm.ErrGone
	}
	m.qmp = q
	return q, nil
}

// disconnect closes the connection permanently.
func (m *machine) disconnect() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	if m.qmp != nil {
		m.qmp.close()
	}
}

// execute runs a command of the monitor.
func (m *machine) execute(ctx context.Context, command string, arguments any, files ...*os.File) (json.RawMessage, error) {
	q, err := m.monitor(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", command, err)
	}
	return q.execute(ctx, command, arguments, files...)
}

// greet asks for the events that Restore waits for, switches off announcements of the captured MAC, and asks for the
// state.
func (m *machine) greet(ctx context.Context, q *qmp) error {
	if _, err := q.execute(ctx, "migrate-set-capabilities", map[string]any{
		"capabilities": []any{map[string]any{"capability": "events", "state": true}},
	}); err != nil {
		return err
	}
	// The announcements last half a second after the resume: RARP from QEMU, and ARP from the guest on QEMU's request.
	// That is longer than a fork may take until its release.
	if _, err := q.execute(ctx, "migrate-set-parameters", map[string]any{"announce-rounds": 0}); err != nil {
		return err
	}
	now, err := status(ctx, q)
	m.SetState(now)
	return err
}

// ask asks QEMU for the state. Everything that stops the vCPUs (a full disk, an internal error) counts as a pause: only
// Resume finds out whether they can go on.
func (m *machine) ask(ctx context.Context) (vmmproc.State, error) {
	q, err := m.monitor(ctx)
	if err != nil {
		return "", err
	}
	return status(ctx, q)
}

func status(ctx context.Context, q *qmp) (vmmproc.State, error) {
	v, err := q.execute(ctx, "query-status", nil)
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
		return vmmproc.Running, nil
	case status.Status == "prelaunch":
		return vmmproc.Spawned, nil
	case status.Status == "inmigrate":
		return vmmproc.Waiting, nil
	default:
		return vmmproc.Paused, nil
	}
}

func (m *machine) Boot(ctx context.Context) error {
	return m.Step(ctx, "boot", []vmmproc.State{vmmproc.Spawned}, vmmproc.Running, m.command("cont"))
}

func (m *machine) Resume(ctx context.Context) error {
	return m.Step(ctx, "resume", []vmmproc.State{vmmproc.Paused, vmmproc.Running}, vmmproc.Running, m.command("cont"))
}

func (m *machine) Pause(ctx context.Context) error {
	return m.Step(ctx, "pause", []vmmproc.State{vmmproc.Running, vmmproc.Paused}, vmmproc.Paused, m.command("stop"))
}

func (m *machine) command(name string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := m.execute(ctx, name, nil)
		return err
	}
}

func (m *machine) Restore(ctx context.Context, spec vmm.RestoreSpec) error {
	return m.StepRestore(ctx, func(ctx context.Context) error { return m.restore(ctx, spec) })
}

func (m *machine) restore(ctx context.Context, spec vmm.RestoreSpec) error {
	if spec.Inject != nil { // virtio devices read their rings from memory during the load
		r, err := m.Memory()
		if err != nil {
			return err
		}
		if err := spec.Inject(ctx, r); err != nil {
			return err
		}
	}
	// QEMU reads from the offset of the open file. The caller's descriptor would share its offset with other restores.
	own, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", spec.State.Fd()))
	if err != nil {
		return fmt.Errorf("open the device state: %w", err)
	}
	defer own.Close()
	if _, err := m.execute(ctx, "getfd", map[string]any{"fdname": "state"}, own); err != nil {
		return err
	}
	if _, err := m.execute(ctx, "migrate-incoming", map[string]any{"uri": "fd:state"}); err != nil {
		return err
	}
	q, err := m.monitor(ctx)
	if err != nil {
		return err
	}
	return q.awaitMigration(ctx)
}

func (m *machine) SaveState(ctx context.Context, to *os.File) error {
	return m.Step(ctx, "save device state of", []vmmproc.State{vmmproc.Paused}, vmmproc.Paused, func(ctx context.Context) error {
		// QEMU checks the access mode of the descriptor, so it must be write-only.
		v, err := m.execute(ctx, "add-fd", nil, to)
		if err != nil {
			return err
		}
		var set struct {
			ID int `json:"fdset-id"`
		}
		if err := json.Unmarshal(v, &set); err != nil {
			return err
		}
		_, err = m.execute(ctx, "xen-save-devices-state", map[string]any{
			"filename": fmt.Sprintf("/dev/fdset/%d", set.ID), "live": false,
		})
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), vmmproc.CommandTime)
		defer cancel()
		_, removeErr := m.execute(clean, "remove-fd", map[string]any{"fdset-id": set.ID})
		return errors.Join(err, removeErr)
	})
}

func (m *machine) ResizeDisk(ctx context.Context, i int, size int64) error {
	return m.Step(ctx, "resize a disk of", []vmmproc.State{vmmproc.Running, vmmproc.Paused}, "", func(ctx context.Context) error {
		_, err := m.execute(ctx, "block_resize", map[string]any{"node-name": fmt.Sprintf("disk%d", i), "size": size})
		return err
	})
}

func (m *machine) DialAgent(ctx context.Context) (net.Conn, error) {
	if err := m.Gone("connect to the guest"); err != nil {
		return nil, err
	}
	c, err := dial(ctx, filepath.Join(m.Handle().Dir, agentSocket))
	if err != nil {
		return nil, core.Wrapf(errors.Join(err, m.Gone("connect to the guest")), core.Unavailable, core.CodeGuestUnreachable, "the guest's channel does not accept a connection")
	}
	if err := m.accepted(ctx); err != nil {
		return nil, core.Wrapf(errors.Join(err, m.Gone("connect to the guest"), c.Close()), core.Unavailable, core.CodeGuestUnreachable, "the guest's channel has not accepted a connection")
	}
	return c, nil
}

// accepted waits until QEMU itself, and not only the kernel, has accepted a connection to a paused machine's port. The
// port does not notice connections during a pause: at the resume it uses the present connection, or, if there is none,
// it still believes in the old one. Then the guest's next output fails, and a port that has failed holds back all
// output until its connection ends. It takes the next connection for the old one, which therefore gets no answers (QEMU
// 7.2: virtconsole_enable_backend and flush_buf in hw/char/virtio-console.c).
func (m *machine) accepted(ctx context.Context) error {
	if m.State() != vmmproc.Paused {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, vmmproc.CommandTime)
	defer cancel()
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for {
		v, err := m.execute(ctx, "query-chardev", nil)
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
