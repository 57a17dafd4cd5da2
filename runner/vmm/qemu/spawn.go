package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/kvm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
)

// The files of a machine in its directory.
const (
	monitorSocket = "qmp.sock"
	agentSocket   = "agent.sock"
	consoleSocket = "console.sock"
)

// Spawn implements vmm.Driver.
func (d *Driver) Spawn(ctx context.Context, spec vmm.Spec) (vmm.Machine, error) {
	in, err := d.installation(ctx)
	if err != nil {
		return nil, err
	}
	m, err := d.spawn(ctx, in, spec)
	if err != nil {
		return nil, fmt.Errorf("spawn qemu for %s: %w", spec.ID, err)
	}
	return m, nil
}

func (d *Driver) spawn(ctx context.Context, in *installation, spec vmm.Spec) (_ *machine, err error) {
	if err := vmmproc.CheckSpec(spec); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	files := &vmmproc.Inherited{}
	defer files.CloseOwned()
	defer func() {
		if err != nil {
			err = errors.Join(err, removeFiles(spec.Dir))
		}
	}()
	fds, err := collect(files, spec)
	if err != nil {
		return nil, err
	}
	p := profile{machineType: in.machineType(), accelerator: d.cfg.Accelerator, readOnlyBase: in.readOnlyBase()}
	if p.accelerator == acceleratorTCG && !spec.Restore {
		p.tscKHz = hostTSC()
	}
	var groups []uint32
	if p.accelerator == acceleratorKVM && spec.UID != 0 {
		if groups, err = kvm.Group(kvm.Device); err != nil {
			return nil, err
		}
	}
	walls, err := d.jail(ctx, in)
	if err != nil {
		return nil, err
	}
	return vmmproc.Spawn(ctx, DriverName, spec, vmmproc.Command{Path: in.path, Args: arguments(p, spec, fds), Files: files.Files, Groups: groups, Jail: walls},
		func(proc *vmmproc.Process, log *vmmproc.Log, h vmm.Handle) (*machine, error) {
			return attach(ctx, proc, log, h)
		})
}

// Recover implements vmm.Driver.
func (d *Driver) Recover(ctx context.Context, h vmm.Handle) (vmm.Machine, error) {
	m, err := vmmproc.Recover(ctx, DriverName, h, func(proc *vmmproc.Process) (*machine, error) {
		return reattach(ctx, proc, h)
	})
	if err != nil {
		return nil, fmt.Errorf("recover process %d: %w", h.PID, err)
	}
	return m, nil
}

// End implements vmm.Driver.
func (d *Driver) End(ctx context.Context, h vmm.Handle) error { return vmmproc.End(ctx, h) }

// Reap implements vmm.Driver. A QEMU's name is in its arguments; see arguments.
func (d *Driver) Reap(ctx context.Context, cluster string, keep []vmm.Handle) (int, error) {
	return vmmproc.Reap(ctx, cluster, keep, func(args []string) bool { return isOf(cluster, args) })
}

// isOf reports whether these are the arguments of a machine of the cluster.
func isOf(cluster string, args []string) bool {
	at := slices.Index(args, "-name")
	if at < 1 || at+1 >= len(args) || !strings.HasPrefix(filepath.Base(args[0]), "qemu-system-") {
		return false
	}
	id, ok := strings.CutPrefix(args[at+1], nameOf(cluster, ""))
	if !ok {
		return false
	}
	_, err := core.ParseID[core.SandboxID](id) // not of a cluster whose name only begins with this one's
	return err == nil
}

// collect makes the machine's sockets and lists the files that the VMM inherits.
func collect(in *vmmproc.Inherited, spec vmm.Spec) (d descriptors, err error) {
	for _, s := range []struct {
		to   *int
		name string
	}{{&d.monitor, monitorSocket}, {&d.agent, agentSocket}, {&d.console, consoleSocket}} {
		if *s.to, err = in.AddOwned(vmmproc.Listen(filepath.Join(spec.Dir, s.name))); err != nil {
			return d, err
		}
	}
	d.base = in.Add(spec.Base)
	if !spec.Restore {
		d.kernel, d.initrd = in.Add(spec.Kernel), in.Add(spec.Initrd)
	}
	for _, disk := range spec.Disks {
		d.disks = append(d.disks, in.Add(disk.File))
	}
	if spec.Tap != nil {
		d.tap = in.Add(spec.Tap)
	}
	return d, nil
}

func removeFiles(dir string) error {
	var errs []error
	for _, name := range []string{monitorSocket, agentSocket, consoleSocket} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
