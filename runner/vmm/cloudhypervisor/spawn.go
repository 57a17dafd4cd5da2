package cloudhypervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/jail"
	"github.com/coppice-dev/coppice/runner/vmm/kvm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
)

// The files of a machine in its directory, and those of the VMM in its own directory.
const (
	apiSocket  = "api.sock"
	eventsFIFO = "events"
	restoreDir = "restore" // config.json and state.json; the VMM reads it
	ownDir     = "own"     // the VMM's own: its sockets, and snapshots while they are taken

	vsockSocket  = "vsock.sock"
	serialSocket = "serial.sock"
)

// Spawn implements vmm.Driver.
func (d *Driver) Spawn(ctx context.Context, spec vmm.Spec) (vmm.Machine, error) {
	in, err := d.installation(ctx)
	if err != nil {
		return nil, err
	}
	m, err := d.spawn(ctx, in, spec)
	if err != nil {
		return nil, fmt.Errorf("spawn cloud-hypervisor for %s: %w", spec.ID, err)
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
	var groups []uint32
	if spec.UID != 0 {
		if groups, err = kvm.Group(kvm.Device); err != nil {
			return nil, err
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, removeFiles(spec.Dir))
		}
	}()
	files := &vmmproc.Inherited{}
	defer files.CloseOwned()
	fd, err := collect(files, spec)
	if err != nil {
		return nil, err
	}
	conf := config(spec, fd, in.landlock)
	if spec.Restore {
		if err := writeConfig(spec.Dir, conf); err != nil {
			return nil, err
		}
	}
	walls, err := d.jail(ctx, in)
	if err != nil {
		return nil, err
	}
	// Landlock is requested in the configuration: without a kernel on the command line, its flag is refused.
	args := []string{"--api-socket", fmt.Sprintf("fd=%d", apiFD), "--event-monitor", fmt.Sprintf("fd=%d", eventsFD), "--seccomp", "true"}
	return vmmproc.Spawn(ctx, DriverName, spec, vmmproc.Command{Path: in.path, Name: nameOf(spec.Cluster, spec.ID), Args: args, Files: files.Files, Groups: groups, Jail: walls},
		func(proc *vmmproc.Process, log *vmmproc.Log, h vmm.Handle) (*machine, error) {
			m, err := attach(ctx, proc, log, h)
			if err != nil || spec.Restore {
				return m, err
			}
			if err := m.create(ctx, conf, spec); err != nil {
				m.Release()
				return nil, err
			}
			return m, nil
		})
}

// jail returns the file system of this installation's machines, which is built once. It is nil for a runner that is not
// root, which can neither build one nor give a machine its own user.
func (d *Driver) jail(ctx context.Context, in *installation) (*jail.Jail, error) {
	if os.Geteuid() != 0 {
		return nil, nil //nolint:nilnil // see above
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if in.walls != nil {
		return in.walls, nil
	}
	program, err := filepath.Abs(in.path)
	if err != nil {
		return nil, err
	}
	devices := []string{os.DevNull, randomDevice} // a restore uses the first as its kernel
	if _, err := os.Stat(kvm.Device); err == nil {
		devices = append(devices, kvm.Device)
	}
	if in.walls, err = jail.New(ctx, jail.Config{Program: program, Devices: devices}); err != nil {
		return nil, core.Wrapf(err, core.FailedPrecondition, core.CodeVMMFailed, "cloud-hypervisor's machines cannot be confined: %v", err)
	}
	return in.walls, nil
}

// create sends the VMM what to boot.
func (m *machine) create(ctx context.Context, conf vmConfig, spec vmm.Spec) error {
	ctx, cancel := context.WithTimeoutCause(ctx, vmmproc.CommandTime, vmmproc.ErrSilent)
	defer cancel()
	if err := m.api.put(ctx, "vm.create", conf); err != nil {
		return err
	}
	m.SetState(vmmproc.Spawned)
	if spec.Tap == nil {
		return nil
	}
	return m.api.put(ctx, "vm.add-net", network(spec.MAC), spec.Tap)
}

// Recover implements vmm.Driver.
func (d *Driver) Recover(ctx context.Context, h vmm.Handle) (vmm.Machine, error) {
	m, err := vmmproc.Recover(ctx, DriverName, h, func(proc *vmmproc.Process) (*machine, error) {
		return attach(ctx, proc, vmmproc.NoLog(), h)
	})
	if err != nil {
		return nil, fmt.Errorf("recover process %d: %w", h.PID, err)
	}
	return m, nil
}

// End implements vmm.Driver.
func (d *Driver) End(ctx context.Context, h vmm.Handle) error { return vmmproc.End(ctx, h) }

// Reap implements vmm.Driver. The name of a cloud-hypervisor is its first argument; see nameOf.
func (d *Driver) Reap(ctx context.Context, cluster string, keep []vmm.Handle) (int, error) {
	return vmmproc.Reap(ctx, cluster, keep, func(args []string) bool { return isOf(cluster, args) })
}

// nameOf is the name of a machine, for people and for Reap: cloud-hypervisor has no argument for a name.
func nameOf(cluster string, id core.SandboxID) string {
	return fmt.Sprintf("%s:coppice-%s-%s", Program, cluster, id)
}

// isOf reports whether these are the arguments of a machine of the cluster.
func isOf(cluster string, args []string) bool {
	id, ok := strings.CutPrefix(args[0], nameOf(cluster, ""))
	if !ok {
		return false
	}
	_, err := core.ParseID[core.SandboxID](id) // not of a cluster whose name only begins with this one's
	return err == nil
}

// collect creates the files in the machine's directory and opens them for the VMM, in the order of the constants in
// config.go.
func collect(in *vmmproc.Inherited, spec vmm.Spec) (d descriptors, err error) {
	if _, err := in.AddOwned(vmmproc.Listen(filepath.Join(spec.Dir, apiSocket))); err != nil {
		return d, err
	}
	if _, err := in.AddOwned(makeEvents(filepath.Join(spec.Dir, eventsFIFO))); err != nil {
		return d, err
	}
	if _, err := in.AddOwned(makeDir(filepath.Join(spec.Dir, ownDir), 0o700, spec.UID, spec.GID)); err != nil {
		return d, err
	}
	if _, err := in.AddOwned(makeDir(filepath.Join(spec.Dir, restoreDir), 0o755, 0, 0)); err != nil {
		return d, err
	}
	in.Add(spec.Base)
	if _, err := in.AddOwned(makeDelta(filepath.Join(spec.Dir, restoreDir))); err != nil {
		return d, err
	}
	tap := spec.Base
	if spec.Tap != nil {
		tap = spec.Tap
	}
	in.Add(tap)
	if !spec.Restore {
		d.kernel, d.initrd = in.Add(spec.Kernel), in.Add(spec.Initrd)
	}
	for i, disk := range spec.Disks {
		if !disk.ReadOnly && spec.UID != 0 { // it opens the file again by its path
			if err := disk.File.Chown(int(spec.UID), int(spec.GID)); err != nil {
				return d, fmt.Errorf("give disk %d to the VMM's user: %w", i, err)
			}
		}
		d.disks = append(d.disks, in.Add(disk.File))
	}
	return d, nil
}

// makeEvents makes the FIFO for events. The VMM's end is open for reading and writing, so that the FIFO lives on, and
// keeps unread events, while no runner reads.
func makeEvents(path string) (*os.File, error) {
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return nil, &os.PathError{Op: "mkfifo", Path: path, Err: err}
	}
	return os.OpenFile(path, os.O_RDWR, 0)
}

// makeDelta makes an empty memfd for the delta, and a link to it in the restore directory.
func makeDelta(dir string) (*os.File, error) {
	fd, err := unix.MemfdCreate("coppice-delta", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), "coppice-delta")
	if err := os.Symlink(fdPath(deltaFD), filepath.Join(dir, memoryFile)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func makeDir(path string, mode os.FileMode, uid, gid uint32) (*os.File, error) {
	if err := os.Mkdir(path, mode); err != nil {
		return nil, err
	}
	if uid != 0 {
		if err := os.Chown(path, int(uid), int(gid)); err != nil {
			return nil, err
		}
	}
	if os.Geteuid() != 0 {
		return os.Open(path)
	}
	return jail.Detached(path) // with a plain descriptor, the VMM could get out of the jail
}

// writeConfig writes the file that a restore reads beside the state.
func writeConfig(dir string, c vmConfig) error {
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, restoreDir, configFile), b, 0o644) //nolint:gosec // G306: the VMM's user reads it
}

func removeFiles(dir string) error {
	var errs []error
	for _, name := range []string{apiSocket, eventsFIFO, ownDir, restoreDir} {
		errs = append(errs, os.RemoveAll(filepath.Join(dir, name)))
	}
	return errors.Join(errs...)
}
