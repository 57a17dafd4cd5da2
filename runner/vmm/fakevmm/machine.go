package fakevmm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// machine controls a computer.
type machine struct{ *computer }

var _ vmm.Machine = (*machine)(nil)

func (m *machine) Handle() vmm.Handle    { return m.handle }
func (m *machine) Console() string       { return m.console.String() }
func (m *machine) Done() <-chan struct{} { return m.done }
func (m *machine) Release()              {}

func (m *machine) Exit() vmm.Exit {
	select {
	case <-m.done:
	default:
		return vmm.Exit{}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exit
}

// gone is the error of every method once the machine has ended.
func (m *machine) gone(verb string) error {
	select {
	case <-m.done:
		return fmt.Errorf("%s: %w", verb, vmm.ErrGone)
	default:
		return nil
	}
}

// step runs fn if the machine is in one of the states from, and then sets the state to; "" keeps the state.
func (m *machine) step(ctx context.Context, step Step, from []state, to state, fn func() error) error {
	verb := string(step)
	if err := m.gone(verb); err != nil {
		return err
	}
	m.mu.Lock()
	now := m.state
	m.mu.Unlock()
	if !slices.Contains(from, now) {
		return fmt.Errorf("%s a machine that is %s: %w", verb, now, vmm.ErrState)
	}
	err := m.driver.reach(ctx, step, m.id, m.computer)
	if err == nil {
		err = fn()
	}
	if err != nil {
		if step == StepRestore {
			m.setState(stateFailed)
		}
		return fmt.Errorf("%s: %w", verb, errors.Join(err, m.gone(verb)))
	}
	if to != "" {
		m.setState(to)
	}
	return nil
}

func (m *machine) setState(s state) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state = s
}

func (m *machine) Boot(ctx context.Context) error {
	return m.step(ctx, StepBoot, []state{stateSpawned}, stateRunning, func() error { m.run(true); return nil })
}

func (m *machine) Resume(ctx context.Context) error {
	return m.step(ctx, StepResume, []state{statePaused, stateRunning}, stateRunning, func() error { m.run(true); return nil })
}

func (m *machine) Pause(ctx context.Context) error {
	return m.step(ctx, StepPause, []state{stateRunning, statePaused}, statePaused, func() error { m.run(false); return nil })
}

func (m *machine) Stop() error {
	if err := m.gone("stop"); err != nil {
		return err
	}
	m.setStopped(true)
	return nil
}

func (m *machine) Continue() error {
	if err := m.gone("continue"); err != nil {
		return err
	}
	m.setStopped(false)
	return nil
}

func (m *machine) Running(context.Context) (bool, error) {
	if err := m.gone("look whether the machine runs"); err != nil {
		return false, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state == stateRunning, nil
}

func (m *machine) Memory() (memory.Region, error) {
	if err := m.gone("find the memory"); err != nil {
		return memory.Region{}, err
	}
	r := m.region()
	if r.Size == 0 {
		return memory.Region{}, fmt.Errorf("find the memory: %w", vmm.ErrGone)
	}
	return r, nil
}

func (m *machine) Restore(ctx context.Context, spec vmm.RestoreSpec) error {
	return m.step(ctx, StepRestore, []state{stateWaiting}, statePaused, func() error {
		if err := m.inject(ctx, spec.Inject); err != nil {
			return err
		}
		d, err := readDeviceState(spec.State)
		if err != nil {
			return err
		}
		m.cpu.SetClock(d.Uptime)
		return nil
	})
}

// inject prevents that RAM is unmapped meanwhile: otherwise it would write to the next mapping at that place.
func (m *machine) inject(ctx context.Context, inject vmm.Injector) error {
	if err := m.driver.reach(ctx, StepInject, m.id, m.computer); err != nil || inject == nil {
		return err
	}
	m.injecting.RLock()
	defer m.injecting.RUnlock()
	r := m.region()
	if r.Size == 0 {
		return vmm.ErrGone
	}
	return inject(ctx, r)
}

func (m *machine) SaveState(ctx context.Context, to *os.File) error {
	return m.step(ctx, StepSave, []state{statePaused}, statePaused, func() error {
		b, err := deviceState{Uptime: m.cpu.Clock()}.encode()
		if err != nil {
			return err
		}
		_, err = to.Write(b)
		return err
	})
}

func (m *machine) ResizeDisk(ctx context.Context, i int, size int64) error {
	return m.step(ctx, StepResize, []state{stateRunning, statePaused}, "", func() error {
		if i < 0 || i >= len(m.disks) {
			return core.Errorf(core.Internal, core.CodeInternal, "there is no disk %d", i)
		}
		return m.disks[i].file.Truncate(size)
	})
}

func (m *machine) DialAgent(ctx context.Context) (net.Conn, error) {
	const verb = "connect to the guest"
	if err := m.gone(verb); err != nil {
		return nil, err
	}
	err := m.driver.reach(ctx, StepDial, m.id, m.computer)
	var conn net.Conn
	if err == nil {
		conn, err = m.dial()
	}
	if err != nil {
		return nil, core.Wrapf(errors.Join(err, m.gone(verb)), core.Unavailable, core.CodeGuestUnreachable, "the guest's channel does not accept a connection")
	}
	return conn, nil
}

func (m *machine) Kill(ctx context.Context) error {
	select {
	case <-m.done:
		return nil
	default:
	}
	// If the caller has given up, its machine is killed all the same.
	if err := m.driver.reach(context.WithoutCancel(ctx), StepKill, m.id, m.computer); err != nil && !errors.Is(err, vmm.ErrGone) {
		return fmt.Errorf("kill: %w", err)
	}
	m.end(vmm.Exit{Killed: true, Status: "signal: killed"})
	select {
	case <-m.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("kill: %w", context.Cause(ctx))
	}
}

// deviceState is the state of a fake machine besides memory and disks.
type deviceState struct {
	Uptime time.Duration `json:"uptime_ns"`
}

// The form of the file: a line with the magic, one with the CRC-32 of the rest, then JSON.
const stateMagic = "coppice fake device state 1"

func (d deviceState) encode() ([]byte, error) {
	b, err := json.Marshal(d)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "%s\n%d\n%s", stateMagic, crc32.ChecksumIEEE(b), b), nil
}

// readDeviceState reads a file from its beginning, wherever its offset is.
func readDeviceState(f *os.File) (deviceState, error) {
	var d deviceState
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<20))
	if err != nil {
		return d, fmt.Errorf("read the device state: %w", err)
	}
	magic, rest, _ := bytes.Cut(b, []byte("\n"))
	sum, body, _ := bytes.Cut(rest, []byte("\n"))
	if string(magic) != stateMagic || string(sum) != strconv.FormatUint(uint64(crc32.ChecksumIEEE(body)), 10) || json.Unmarshal(body, &d) != nil {
		return d, core.Errorf(core.DataLoss, core.CodeVMMFailed, "the fake machine could not load the device state of the checkpoint")
	}
	return d, nil
}
