package vmmproc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// CheckSpec refuses errors that would otherwise only show as a crash of the guest.
func CheckSpec(spec vmm.Spec) error {
	_, err := checkSpec(spec)
	return err
}

// checkSpec is CheckSpec, and also returns the base's inode.
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

// Inherited collects the descriptors that a VMM inherits, in order: the first becomes 3.
type Inherited struct {
	Files []*os.File
	owned []*os.File
}

// Add adds a file, which still belongs to the caller, and returns its number in the VMM.
func (in *Inherited) Add(f *os.File) int {
	in.Files = append(in.Files, f)
	return 2 + len(in.Files)
}

// AddOwned adds a file that was opened for the VMM, unless opening it failed.
func (in *Inherited) AddOwned(f *os.File, err error) (int, error) {
	if err != nil {
		return 0, err
	}
	in.owned = append(in.owned, f)
	return in.Add(f), nil
}

// CloseOwned closes the files of AddOwned, when the VMM has its own copies.
func (in *Inherited) CloseOwned() {
	for _, f := range in.owned {
		_ = f.Close() // the VMM has its own copy
	}
}

// Listen binds a socket that only the runner can reach, and returns it for the VMM, which could not make it itself.
func Listen(path string) (*os.File, error) {
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

// Attaching returns a context that also ends with the process, because a VMM that refuses its command line ends before
// it accepts a connection. explain adds that to an error, because a dial reports only a cancellation.
func Attaching(ctx context.Context, proc *Process) (_ context.Context, explain func(error) error, stop func()) {
	ctx, cancel := context.WithTimeoutCause(ctx, CommandTime, ErrSilent)
	ctx, gone := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-proc.Done():
			status, _ := proc.Status()
			gone(fmt.Errorf("%w: %s", vmm.ErrGone, status))
		case <-ctx.Done():
		}
	}()
	explain = func(err error) error {
		if cause := context.Cause(ctx); err != nil && errors.Is(cause, vmm.ErrGone) {
			return errors.Join(cause, err)
		}
		return err
	}
	return ctx, explain, func() { gone(nil); cancel() }
}

// Recover finds the process of a handle and has attach connect to it. It fails with ErrGone when that very process no longer exists.
func Recover[M any](ctx context.Context, driver string, h vmm.Handle, attach func(*Process) (M, error)) (m M, err error) {
	if h.Driver != driver {
		return m, core.Errorf(core.Internal, core.CodeInternal, "the machine is one of %q, not of %s", h.Driver, driver)
	}
	proc, err := Attach(h.PID, h.StartTime)
	if errors.Is(err, os.ErrProcessDone) {
		return m, vmm.ErrGone
	}
	if err != nil {
		return m, err
	}
	err = proc.Signal(unix.SIGCONT) // the earlier runner may have stopped the process
	if err == nil {
		m, err = attach(proc)
	}
	if err == nil {
		return m, nil
	}
	defer proc.Release()
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT) || errors.Is(err, vmm.ErrGone) {
		// Nobody listens: the process is just ending, or has ended and its parent has not reaped it.
		dying := time.NewTimer(dyingTime)
		defer dying.Stop()
		select {
		case <-proc.Done():
			return m, errors.Join(vmm.ErrGone, err)
		case <-dying.C:
		case <-ctx.Done():
		}
	}
	return m, err
}

// dyingTime is the time that a process may still need to end after its sockets were closed: its memory is freed in
// between.
const dyingTime = 2 * time.Second

// End ends the process of a handle, and waits until it is gone. It is no error if the process no longer exists.
func End(ctx context.Context, h vmm.Handle) error {
	proc, err := Attach(h.PID, h.StartTime)
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

// Reap ends every process whose arguments match and that is not kept. It goes on after an error, and returns how many
// it found. A compromised process may have changed its arguments: it is found by its handle, or by its cgroup.
func Reap(ctx context.Context, cluster string, keep []vmm.Handle, match func(args []string) bool) (int, error) {
	found, err := Find(match)
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

// Spawn starts the VMM of a machine: c has the parts that differ between VMMs, spec has the rest. attach connects to
// it. If that fails, the VMM is ended, and the error contains its output.
func Spawn[M any](ctx context.Context, driver string, spec vmm.Spec, c Command, attach func(*Process, *Log, vmm.Handle) (M, error)) (m M, err error) {
	inode, err := checkSpec(spec)
	if err != nil {
		return m, err
	}
	log, logEnd, err := NewLog()
	if err != nil {
		return m, err
	}
	c.Log, c.Dir, c.NetNS, c.UID, c.GID, c.CgroupFD = logEnd, "/", spec.NetNS, spec.UID, spec.GID, spec.CgroupFD
	proc, err := Start(c)
	_ = logEnd.Close() // the VMM has its own copy
	if err != nil {
		log.Close()
		return m, err
	}
	m, err = attach(proc, log, vmm.Handle{
		Driver: driver, PID: proc.PID, StartTime: proc.StartTime, Dir: spec.Dir, MemoryMiB: spec.MemoryMiB, BaseInode: inode,
	})
	if err != nil {
		return m, abort(ctx, driver, proc, log, err)
	}
	return m, nil
}

// abort ends a VMM that did not start, and adds its output to the error.
func abort(ctx context.Context, program string, proc *Process, log *Log, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), CommandTime)
	defer cancel()
	err = errors.Join(err, proc.Kill(ctx))
	log.Drain()
	log.Close()
	if said := strings.TrimSpace(log.End()); said != "" {
		err = core.Wrapf(err, core.Unavailable, core.CodeVMMFailed, "%s did not start: it said %q", program, said)
	}
	return err
}
