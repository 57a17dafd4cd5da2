package qemu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

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
	inode, err := checkSpec(spec)
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	files := &inherited{}
	defer files.closeOwned()
	defer func() {
		if err != nil {
			err = errors.Join(err, removeFiles(spec.Dir))
		}
	}()
	fds, err := files.collect(spec)
	if err != nil {
		return nil, err
	}
	p := profile{machineType: in.machineType(), accelerator: d.cfg.Accelerator, readOnlyBase: in.readOnlyBase()}
	var groups []uint32
	if p.accelerator == acceleratorKVM && spec.UID != 0 {
		if groups, err = kvm.Group(kvm.Device); err != nil {
			return nil, err
		}
	}
	log, logEnd, err := vmmproc.NewLog()
	if err != nil {
		return nil, err
	}
	proc, err := vmmproc.Start(vmmproc.Command{
		Path: in.path, Args: arguments(p, spec, fds), Files: files.list, Log: logEnd, Dir: "/",
		NetNS: spec.NetNS, UID: spec.UID, GID: spec.GID, Groups: groups, CgroupFD: spec.CgroupFD,
	})
	_ = logEnd.Close() // QEMU has its own copy
	if err != nil {
		log.Close()
		return nil, err
	}
	h := vmm.Handle{
		Driver: DriverName, PID: proc.PID, StartTime: proc.StartTime, Dir: spec.Dir,
		MemoryMiB: spec.MemoryMiB, BaseInode: inode,
	}
	m, err := attach(ctx, proc, log, h)
	if err != nil {
		return nil, abort(ctx, proc, log, err)
	}
	return m, nil
}

// abort ends a QEMU that did not come up, and adds what it said.
func abort(ctx context.Context, proc *vmmproc.Process, log *vmmproc.Log, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), vmmproc.CommandTime)
	defer cancel()
	err = errors.Join(err, proc.Kill(ctx))
	log.Drain()
	log.Close()
	if said := strings.TrimSpace(log.End()); said != "" {
		err = core.Wrapf(err, core.Unavailable, core.CodeVMMFailed, "qemu did not start: it said %q", said)
	}
	return err
}

// checkSpec refuses what would only show as a crash of the guest, and returns the base's inode.
func checkSpec(spec vmm.Spec) (inode uint64, err error) {
	bad := func(format string, a ...any) (uint64, error) {
		return 0, core.Errorf(core.Internal, core.CodeInternal, format, a...)
	}
	if spec.Base == nil || !spec.Restore && (spec.Kernel == nil || spec.Initrd == nil) {
		return bad("a file of the machine is missing")
	}
	for i, disk := range spec.Disks {
		if disk.File == nil {
			return bad("the file of disk %d is missing", i)
		}
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(spec.Base.Fd()), &st); err != nil {
		return 0, fmt.Errorf("examine the base: %w", err)
	}
	if want := int64(spec.MemoryMiB) << 20; st.Size != want || want == 0 {
		return bad("the base has %d bytes and the machine %d MiB of RAM", st.Size, spec.MemoryMiB)
	}
	return st.Ino, nil
}

// Recover implements vmm.Driver.
func (d *Driver) Recover(ctx context.Context, h vmm.Handle) (vmm.Machine, error) {
	m, err := d.recover(ctx, h)
	if err != nil {
		return nil, fmt.Errorf("recover process %d: %w", h.PID, err)
	}
	return m, nil
}

func (d *Driver) recover(ctx context.Context, h vmm.Handle) (*machine, error) {
	if h.Driver != DriverName {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "the machine is one of %q, not of qemu", h.Driver)
	}
	proc, err := vmmproc.Attach(h.PID, h.StartTime)
	if errors.Is(err, os.ErrProcessDone) {
		return nil, vmm.ErrGone
	}
	if err != nil {
		return nil, err
	}
	m, err := attach(ctx, proc, vmmproc.NoLog(), h)
	if err == nil {
		return m, nil
	}
	defer proc.Release()
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT) || errors.Is(err, vmm.ErrGone) {
		// Nobody listens: it ends just now, or has ended and was not reaped by its parent.
		dying := time.NewTimer(dyingTime)
		defer dying.Stop()
		select {
		case <-proc.Done():
			return nil, errors.Join(vmm.ErrGone, err)
		case <-dying.C:
		case <-ctx.Done():
		}
	}
	return nil, err
}

// End implements vmm.Driver.
func (d *Driver) End(ctx context.Context, h vmm.Handle) error {
	proc, err := vmmproc.Attach(h.PID, h.StartTime)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	if err == nil {
		err = proc.Kill(ctx)
	}
	if err != nil {
		return fmt.Errorf("end process %d: %w", h.PID, err)
	}
	return nil
}

// Reap implements vmm.Driver. What a QEMU is called is in its arguments, see arguments. One that was taken over may have changed
// them: it is found by its handle, or by its cgroup.
func (d *Driver) Reap(ctx context.Context, cluster string, keep []vmm.Handle) (int, error) {
	found, err := vmmproc.Find(func(args []string) bool { return isOf(cluster, args) })
	errs := []error{err}
	n := 0
	for _, p := range found {
		if slices.ContainsFunc(keep, func(h vmm.Handle) bool { return h.PID == p.PID && h.StartTime == p.StartTime }) {
			p.Release()
			continue
		}
		n++
		errs = append(errs, p.Kill(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return n, fmt.Errorf("end the machines of cluster %s: %w", cluster, err)
	}
	return n, nil
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
	_, err := core.ParseID[core.SandboxID](id) // and not of a cluster whose name begins like this one's
	return err == nil
}

// dyingTime is how long a process whose sockets are closed already may take to end: its memory is freed in between.
const dyingTime = 2 * time.Second

// inherited collects the descriptors that the VMM inherits, in order: the first becomes 3.
type inherited struct {
	list  []*os.File
	owned []*os.File
}

func (in *inherited) add(f *os.File) int {
	in.list = append(in.list, f)
	return 2 + len(in.list)
}

func (in *inherited) addOwned(f *os.File, err error) (int, error) {
	if err != nil {
		return 0, err
	}
	in.owned = append(in.owned, f)
	return in.add(f), nil
}

func (in *inherited) closeOwned() {
	for _, f := range in.owned {
		_ = f.Close() // the VMM has its own copy
	}
}

func (in *inherited) collect(spec vmm.Spec) (d descriptors, err error) {
	for _, s := range []struct {
		to   *int
		name string
	}{{&d.monitor, monitorSocket}, {&d.agent, agentSocket}, {&d.console, consoleSocket}} {
		if *s.to, err = in.addOwned(listen(filepath.Join(spec.Dir, s.name))); err != nil {
			return d, err
		}
	}
	d.base = in.add(spec.Base)
	if !spec.Restore {
		d.kernel, d.initrd = in.add(spec.Kernel), in.add(spec.Initrd)
	}
	for _, disk := range spec.Disks {
		d.disks = append(d.disks, in.add(disk.File))
	}
	if spec.Tap != nil {
		d.tap = in.add(spec.Tap)
	}
	return d, nil
}

// listen binds a socket that only the runner can reach and returns it for the VMM, which could not make it itself.
func listen(path string) (*os.File, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	f, err := l.File()
	if err = errors.Join(err, l.Close()); err != nil {
		return nil, err
	}
	return f, os.Chmod(path, 0o600)
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
