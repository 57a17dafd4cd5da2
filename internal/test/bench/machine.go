package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	"github.com/coppice-dev/coppice/runner/guest"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/sandboxnet"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// machine is a VM that is not a sandbox: nothing of it is sealed.
type machine struct {
	vmm.Machine
	overlay *os.File
	ns      sandboxnet.Namespace
	agent   *guest.Client
	dirs    []string
}

// clone is the source of an unsealed fork: a machine as it was in the middle of its work. Its workload was not frozen,
// and its agent was not told.
type clone struct {
	memoryMiB int
	base      *memory.Base
	delta     *memory.Delta // nil when the base is everything
	capture   *memory.Capture
	state     *os.File
	overlay   *os.File
}

// spawn starts a waiting VMM: for Boot on the zero base, otherwise for Restore.
func (l *lab) spawn(ctx context.Context, memoryMiB int, base *memory.Base) (_ *machine, err error) {
	id := core.NewID[core.SandboxID]()
	m := &machine{dirs: []string{filepath.Join(l.dir, string(id)), filepath.Join(l.runDir, string(id))}}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close(ctx))
		}
	}()
	for _, d := range m.dirs {
		if err := os.Mkdir(d, 0o700); err != nil {
			return nil, err
		}
	}
	if m.overlay, err = os.OpenFile(filepath.Join(m.dirs[0], "overlay"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return nil, err
	}
	spec := vmm.Spec{
		ID: id, Cluster: l.cluster, Dir: m.dirs[1], VCPUs: 1, MemoryMiB: memoryMiB, Base: base.File(),
		MAC: "02:c0:99:1c:e0:02", UID: firstUID, GID: firstUID, Restore: base.ID != "", CommandLine: l.image.CommandLine,
	}
	root, err := os.Open(l.image.RootFS)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	spec.Disks = []vmm.Disk{{File: root, ReadOnly: true, Serial: "root"}, {File: m.overlay, Serial: "overlay"}}
	if base.ID == "" {
		files, err := l.bootFiles(m.overlay, &spec)
		defer closeAll(files)
		if err != nil {
			return nil, err
		}
	} else if err := m.overlay.Truncate(l.overlayBytes()); err != nil {
		return nil, err
	}
	if m.ns, err = l.network.Acquire(ctx); err != nil {
		return nil, err
	}
	if spec.Tap, err = m.ns.TapFile(l.driver.Capabilities().TapUp); err != nil {
		return nil, err
	}
	defer spec.Tap.Close()
	if spec.NetNS, err = m.ns.NetNS(); err != nil {
		return nil, err
	}
	defer spec.NetNS.Close()
	m.Machine, err = l.driver.Spawn(ctx, spec)
	return m, err
}

func (l *lab) overlayBytes() int64 {
	info, err := os.Stat(l.image.Overlay)
	if err != nil {
		return 0
	}
	return info.Size()
}

// bootFiles opens what a cold boot reads, and fills the overlay.
func (l *lab) bootFiles(overlay *os.File, spec *vmm.Spec) (files []*os.File, err error) {
	for _, path := range []string{l.image.Kernel, l.image.Initrd, l.image.Overlay} {
		f, err := os.Open(path)
		if err != nil {
			return files, err
		}
		files = append(files, f)
	}
	spec.Kernel, spec.Initrd = files[0], files[1]
	_, err = sparse.Clone(overlay, files[2])
	return files, err
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // only read
	}
}

// connect dials the agent.
func (m *machine) connect(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, guestTime)
	defer cancel()
	m.agent, err = guest.Dial(ctx, m.DialAgent)
	return err
}

func (m *machine) exec(ctx context.Context, command ...string) error {
	return execThrough(ctx, m.agent.Proxy(failed), command...)
}

func (m *machine) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer cancel()
	var errs []error
	if m.agent != nil {
		_ = m.agent.Close() // the guest is about to end anyway
	}
	if m.Machine != nil {
		errs = append(errs, m.Kill(ctx))
	}
	if m.ns != nil {
		errs = append(errs, m.ns.Release(ctx))
	}
	if m.overlay != nil {
		errs = append(errs, m.overlay.Close())
	}
	for _, d := range m.dirs {
		errs = append(errs, os.RemoveAll(d))
	}
	return errors.Join(errs...)
}

// boot cold-boots a machine. It returns the times to the agent's answer and to the end of the first command.
func (l *lab) boot(ctx context.Context, memoryMiB int) (_ *machine, answer, first float64, err error) {
	began := time.Now()
	zero, err := l.bases.Zero(int64(memoryMiB) << 20)
	if err != nil {
		return nil, 0, 0, err
	}
	defer zero.Close()
	m, err := l.spawn(ctx, memoryMiB, zero)
	if err != nil {
		return nil, 0, 0, err
	}
	err = m.Boot(ctx)
	if err == nil {
		err = m.connect(ctx)
	}
	answer = report.Since(began)
	if err == nil {
		err = m.exec(ctx, "true")
	}
	first = report.Since(began)
	if err != nil {
		return nil, 0, 0, errors.Join(fmt.Errorf("boot: %w", err), m.close(ctx))
	}
	return m, answer, first, nil
}

// take captures a running machine and ends it. With a nil base, RAM becomes a base.
func (l *lab) take(ctx context.Context, m *machine, memoryMiB int, base *memory.Base) (_ *clone, err error) {
	c := &clone{memoryMiB: memoryMiB}
	defer func() {
		if err = errors.Join(err, m.close(ctx)); err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	region, err := m.Memory()
	if err != nil {
		return nil, err
	}
	if c.capture, err = memory.Prepare(region); err != nil {
		return nil, err
	}
	if c.state, err = os.CreateTemp(l.dir, "state-*"); err != nil {
		return nil, err
	}
	writer, err := os.OpenFile(c.state.Name(), os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	defer writer.Close()
	if c.overlay, err = os.CreateTemp(l.dir, "overlay-*"); err != nil {
		return nil, err
	}
	if err := errors.Join(m.overlay.Sync(), m.Pause(ctx)); err != nil {
		return nil, err
	}
	if err := errors.Join(m.SaveState(ctx, writer), c.capture.Copy()); err != nil {
		return nil, err
	}
	if _, err := sparse.Clone(c.overlay, m.overlay); err != nil {
		return nil, err
	}
	if base != nil {
		c.delta = c.capture.Delta()
		c.base, err = l.bases.Open(base.ID)
		return c, err
	}
	zero, err := l.bases.Zero(int64(memoryMiB) << 20)
	if err != nil {
		return nil, err
	}
	defer zero.Close()
	c.base, err = l.bases.Rebase(zero, c.capture.Delta())
	return c, err
}

func (c *clone) close() error {
	var errs []error
	if c.capture != nil {
		c.capture.Close()
	}
	if c.base != nil {
		errs = append(errs, c.base.Close())
	}
	for _, f := range []*os.File{c.state, c.overlay} {
		if f != nil {
			errs = append(errs, f.Close(), os.Remove(f.Name()))
		}
	}
	return errors.Join(errs...)
}

// grow makes a waiting machine the clone, and lets it run: a fork without any sealing.
func (m *machine) grow(ctx context.Context, c *clone) error {
	if _, err := sparse.Clone(m.overlay, c.overlay); err != nil {
		return err
	}
	if _, err := c.state.Seek(0, io.SeekStart); err != nil {
		return err
	}
	spec := vmm.RestoreSpec{State: c.state}
	if c.delta != nil {
		spec.Inject = func(_ context.Context, r memory.Region) error { return c.delta.Inject(r) }
	}
	if err := m.Restore(ctx, spec); err != nil {
		return err
	}
	if err := m.Resume(ctx); err != nil {
		return err
	}
	return m.connect(ctx)
}

// unsealed starts a VMM and makes a machine from a clone on it.
func (l *lab) unsealed(ctx context.Context, c *clone) (*machine, error) {
	m, err := l.spawn(ctx, c.memoryMiB, c.base)
	if err != nil {
		return nil, err
	}
	if err := m.grow(ctx, c); err != nil {
		return nil, errors.Join(err, m.close(ctx))
	}
	return m, nil
}
