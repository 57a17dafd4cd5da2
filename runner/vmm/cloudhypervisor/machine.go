package cloudhypervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
)

type machine struct {
	*vmmproc.Machine
	api      api
	strategy strategy
	console  *vmmproc.Console
	events   *events

	mu      sync.Mutex    // guards resizes
	resizes map[int]int64 // new sizes of disks that grew during a pause; see ResizeDisk
}

var _ vmm.Machine = (*machine)(nil)

// attach connects to a running cloud-hypervisor. The machine takes over the process and the log.
func attach(ctx context.Context, proc *vmmproc.Process, log *vmmproc.Log, h vmm.Handle) (_ *machine, err error) {
	ctx, explain, stop := vmmproc.Attaching(ctx, proc)
	defer stop()
	defer func() { err = explain(err) }()
	m := &machine{api: api{filepath.Join(h.Dir, apiSocket)}, console: vmmproc.NewConsole(), resizes: map[int]int64{}}
	if m.events, err = openEvents(filepath.Join(h.Dir, eventsFIFO)); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			m.events.close()
		}
	}()
	if m.strategy, err = m.api.strategy(ctx); err != nil {
		return nil, err
	}
	m.Machine = vmmproc.NewMachine(proc, log, m.console, h, vmmproc.Hooks{Ask: m.ask, Detach: m.events.close})
	now, err := m.ask(ctx)
	if err != nil {
		return nil, err
	}
	m.SetState(now)
	if now != vmmproc.Waiting && now != vmmproc.Spawned {
		if err := m.follow(ctx); err != nil {
			return nil, err
		}
	}
	go m.Watch()
	go func() {
		if err := m.events.follow(m.happened); err != nil {
			m.endFor("cloud-hypervisor's events cannot be read: " + err.Error()) // it could restart its guest unseen
		}
	}()
	return m, nil
}

// follow begins to read the console. Its socket exists once the machine exists.
func (m *machine) follow(ctx context.Context) error {
	c, err := m.dialOwn(ctx, serialSocket)
	if err != nil {
		return fmt.Errorf("connect to the guest's console: %w", err)
	}
	m.console.Follow(c)
	return nil
}

// happened is called with every event. If a guest restarts, for example after a panic, the VMM would boot it again in
// this process, or fail to after a restore. So the machine is ended instead.
func (m *machine) happened(e event) {
	if e.Source != "vm" || e.Event != "rebooting" {
		return
	}
	m.endFor("the guest restarted")
}

func (m *machine) endFor(cause string) {
	ctx, cancel := context.WithTimeout(context.Background(), vmmproc.CommandTime)
	defer cancel()
	_ = m.EndFor(ctx, cause) // fails only if the process cannot be killed; Kill reports that too
}

// ask asks the VMM for its state.
func (m *machine) ask(ctx context.Context) (vmmproc.State, error) {
	b, err := m.api.get(ctx, "vm.info")
	if refusedWith(err) == http.StatusNotFound {
		return vmmproc.Waiting, nil
	}
	if err != nil {
		return "", err
	}
	var info struct {
		State string `json:"state"`
	}
	if err := json.Unmarshal(b, &info); err != nil {
		return "", core.Wrapf(err, core.Internal, core.CodeVMMFailed, "cloud-hypervisor's answer to vm.info cannot be read")
	}
	switch info.State {
	case "Created":
		return vmmproc.Spawned, nil
	case "Running":
		return vmmproc.Running, nil
	case "Paused":
		return vmmproc.Paused, nil
	}
	return "", core.Errorf(core.Internal, core.CodeVMMFailed, "cloud-hypervisor reports the unknown state %q of its machine", core.Clip(info.State))
}

func (m *machine) Boot(ctx context.Context) error {
	return m.Step(ctx, "boot", []vmmproc.State{vmmproc.Spawned}, vmmproc.Running, func(ctx context.Context) error {
		if err := m.api.put(ctx, "vm.boot", nil); err != nil {
			return err
		}
		return m.follow(ctx)
	})
}

func (m *machine) Pause(ctx context.Context) error {
	return m.Step(ctx, "pause", []vmmproc.State{vmmproc.Running, vmmproc.Paused}, vmmproc.Paused, func(ctx context.Context) error {
		if m.State() == vmmproc.Paused { // a second pause would be refused
			return nil
		}
		return m.api.put(ctx, "vm.pause", nil)
	})
}

func (m *machine) Resume(ctx context.Context) error {
	return m.Step(ctx, "resume", []vmmproc.State{vmmproc.Paused, vmmproc.Running}, vmmproc.Running, func(ctx context.Context) error {
		if m.State() != vmmproc.Running {
			if err := m.api.put(ctx, "vm.resume", nil); err != nil {
				return err
			}
		}
		return m.resize(ctx)
	})
}

func (m *machine) SaveState(ctx context.Context, to *os.File) error {
	return m.Step(ctx, "save device state of", []vmmproc.State{vmmproc.Paused}, vmmproc.Paused, func(ctx context.Context) error {
		own, err := os.OpenRoot(filepath.Join(m.Handle().Dir, ownDir))
		if err != nil {
			return err
		}
		defer own.Close()
		state, err := m.strategy.capture(ctx, m.api, own)
		if err != nil {
			return err
		}
		_, err = to.Write(state)
		return err
	})
}

func (m *machine) Restore(ctx context.Context, spec vmm.RestoreSpec) error {
	return m.StepRestore(ctx, func(ctx context.Context) error { return m.restore(ctx, spec) })
}

// restore makes the VMM map the base, write the delta into the mapping, and load the state. The order matters, because
// its virtio devices read their positions in their rings from the memory.
func (m *machine) restore(ctx context.Context, spec vmm.RestoreSpec) (err error) {
	state, err := readAll(spec.State)
	if err != nil {
		return fmt.Errorf("read the device state: %w", err)
	}
	if state, err = m.strategy.restorable(state); err != nil {
		return err
	}
	delta, err := m.delta(ctx, spec.Inject)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, delta.Truncate(0), delta.Close()) }() // truncated, because the VMM keeps it open for ever
	dir := filepath.Join(m.Handle().Dir, restoreDir)
	path := filepath.Join(dir, stateFile)
	if err := os.WriteFile(path, state, 0o644); err != nil { //nolint:gosec // G306: the VMM's user reads it
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(path)) }()
	body := map[string]any{"source_url": "file://" + fdPath(restoreFD)}
	files, err := m.network(filepath.Join(dir, configFile))
	if err != nil {
		return err
	}
	if len(files) > 0 {
		defer files[0].Close()
		body["net_fds"] = []any{map[string]any{"id": netID, "num_fds": len(files)}}
	}
	if err := m.api.put(ctx, "vm.restore", body, files...); err != nil {
		return err
	}
	return m.follow(ctx)
}

// delta returns the VMM's memfd for the delta. It is as large as RAM, with the injected pages in their places and holes
// elsewhere.
func (m *machine) delta(ctx context.Context, inject vmm.Injector) (_ *os.File, err error) {
	size := m.Handle().MemoryMiB << 20
	f, err := m.Proc.File(deltaFD)
	if err != nil {
		return nil, fmt.Errorf("get the file for the delta: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Truncate(0), f.Close())
		}
	}()
	if err := f.Truncate(int64(size)); err != nil {
		return nil, err
	}
	if inject == nil {
		return f, nil
	}
	ram, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("map the file for the delta: %w", err)
	}
	region := memory.OnePart(os.Getpid(), uint64(uintptr(unsafe.Pointer(unsafe.SliceData(ram)))), int64(size))
	return f, errors.Join(inject(ctx, region), unix.Munmap(ram))
}

// network returns the tap of a machine that has one. It comes from the VMM's own descriptors, because another runner
// may have started the machine.
func (m *machine) network(config string) ([]*os.File, error) {
	b, err := os.ReadFile(config)
	if err != nil {
		return nil, err
	}
	var c vmConfig
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, err
	}
	if len(c.Net) == 0 {
		return nil, nil
	}
	tap, err := m.Proc.File(tapFD)
	if err != nil {
		return nil, fmt.Errorf("get the tap: %w", err)
	}
	return []*os.File{tap}, nil
}

// readAll reads a file from its beginning, wherever its offset is.
func readAll(f *os.File) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > maxState {
		return nil, core.Errorf(core.DataLoss, core.CodeCheckpointCorrupt, "the device state has %d bytes, which is more than the maximum", info.Size())
	}
	return io.ReadAll(io.NewSectionReader(f, 0, info.Size()))
}

// ResizeDisk of a paused machine is applied at its resume. Otherwise cloud-hypervisor would let the disk's thread run
// at once, which may still write into the memory of the paused machine.
func (m *machine) ResizeDisk(ctx context.Context, i int, size int64) error {
	return m.Step(ctx, "resize a disk of", []vmmproc.State{vmmproc.Running, vmmproc.Paused}, "", func(ctx context.Context) error {
		if err := m.hasDisk(ctx, diskID(i)); err != nil {
			return err
		}
		m.mu.Lock()
		m.resizes[i] = size
		m.mu.Unlock()
		if m.State() == vmmproc.Paused {
			return nil
		}
		return m.resize(ctx)
	})
}

// hasDisk fails for a disk that the machine does not have, so that a delayed resize cannot fail at the resume for this
// reason.
func (m *machine) hasDisk(ctx context.Context, id string) error {
	b, err := m.api.get(ctx, "vm.info")
	if err != nil {
		return err
	}
	var info struct {
		Config struct {
			Disks []struct {
				ID string `json:"id"`
			} `json:"disks"`
		} `json:"config"`
	}
	if err := json.Unmarshal(b, &info); err != nil {
		return core.Wrapf(err, core.Internal, core.CodeVMMFailed, "cloud-hypervisor's answer to vm.info cannot be read")
	}
	for _, d := range info.Config.Disks {
		if d.ID == id {
			return nil
		}
	}
	return core.Errorf(core.Internal, core.CodeInternal, "the machine has no %s", id)
}

// resize tells a running machine about the disks that have grown.
func (m *machine) resize(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, size := range m.resizes {
		if err := m.api.put(ctx, "vm.resize-disk", map[string]any{"id": diskID(i), "desired_size": size}); err != nil {
			return err
		}
		delete(m.resizes, i)
	}
	return nil
}

func (m *machine) DialAgent(ctx context.Context) (net.Conn, error) {
	const verb = "connect to the guest"
	if err := m.Gone(verb); err != nil {
		return nil, err
	}
	c, err := m.dialOwn(ctx, vsockSocket)
	if errors.Is(err, fs.ErrNotExist) {
		err = errors.Join(err, vmm.ErrState)
	}
	if err == nil {
		if c, err = connectVsock(c); err == nil {
			return c, nil
		}
	}
	return nil, core.Wrapf(errors.Join(err, m.Gone(verb)), core.Unavailable, core.CodeGuestUnreachable, "the guest's channel does not accept a connection")
}
