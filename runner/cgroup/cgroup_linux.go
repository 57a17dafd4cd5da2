// Package cgroup gives every VMM its own cgroup v2, if the host has the controllers. The cgroup
// bounds the resources of a VMM, and ends all of its processes at once.
package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Tree is a cgroup of the runner's, with one below it per VMM, and some beside it whose names begin with the tree's and a dot. A nil Tree
// is a host without cgroup v2: it makes nothing.
type Tree struct {
	dir         string
	controllers []string // those that can be limited below
	device      string   // see LimitDevice; empty for none
}

// Group is the cgroup of one VMM.
type Group struct {
	dir     string
	fd      *os.File
	weights bool // of processor time can be set
}

// Find returns the first cgroup v2 mount of the host, or "" if there is none.
func Find() (string, error) {
	f, err := os.Open("/proc/self/mounts")
	if err != nil {
		return "", err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) > 2 && fields[2] == "cgroup2" {
			return fields[1], nil
		}
	}
	return "", nil
}

// Open makes the cgroup name under the mount, with those wanted controllers that the host delegates. It returns nil if
// mount is "" or cannot be written.
func Open(mount, name string) (*Tree, error) {
	if mount == "" || unix.Access(mount, unix.W_OK) != nil {
		return nil, nil //nolint:nilerr // a host without cgroup v2 is no error
	}
	have, err := os.ReadFile(filepath.Join(mount, "cgroup.controllers"))
	if err != nil {
		return nil, fmt.Errorf("read the cgroup controllers: %w", err)
	}
	t := &Tree{dir: filepath.Join(mount, name)}
	if err := os.Mkdir(t.dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) { //nolint:gosec // G301: as the kernel makes them
		return nil, fmt.Errorf("make cgroup %s: %w", t.dir, err)
	}
	for _, c := range wanted {
		if !slices.Contains(strings.Fields(string(have)), c) {
			continue
		}
		// Refused where the mount's own group holds processes: then the VMMs are grouped but not limited.
		if write(mount, "cgroup.subtree_control", "+"+c) == nil && write(t.dir, "cgroup.subtree_control", "+"+c) == nil {
			t.controllers = append(t.controllers, c)
		}
	}
	return t, nil
}

// wanted are the controllers that bound a VMM.
var wanted = []string{"cpu", "io", "memory", "pids"}

// Controllers names what can be limited; empty for a nil Tree.
func (t *Tree) Controllers() []string {
	if t == nil {
		return nil
	}
	return t.controllers
}

// Make makes a group; nil for a nil Tree. One of that name that is there is taken over.
func (t *Tree) Make(name string, l Limits) (*Group, error) {
	if t == nil {
		return nil, nil //nolint:nilnil // see Tree
	}
	g := &Group{dir: filepath.Join(t.dir, name)}
	if err := os.Mkdir(g.dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) { //nolint:gosec // G301: as the kernel makes them
		return nil, fmt.Errorf("make cgroup %s: %w", g.dir, err)
	}
	g.weights = slices.Contains(t.controllers, "cpu")
	err := t.limit(g.dir, l)
	if err == nil {
		g.fd, err = os.Open(g.dir)
	}
	if err != nil {
		return nil, errors.Join(err, os.Remove(g.dir))
	}
	return g, nil
}

// Adopt opens a group that an earlier runner made. It returns nil for a nil Tree, and if there is no group.
func (t *Tree) Adopt(name string) (*Group, error) {
	if t == nil {
		return nil, nil //nolint:nilnil // see Tree
	}
	g := &Group{dir: filepath.Join(t.dir, name)}
	var err error
	if g.fd, err = os.Open(g.dir); errors.Is(err, os.ErrNotExist) {
		return nil, nil //nolint:nilnil // the host had no cgroup v2 then
	}
	return g, err
}

// Beside makes a group without limits beside the tree, or takes over the existing one, and opens its directory. The caller closes it. The
// group is for a process that all VMMs need, and that outlives the runner as they do. Beside returns nil for a nil Tree.
func (t *Tree) Beside(name string) (*os.File, error) {
	if t == nil {
		return nil, nil //nolint:nilnil // see Tree
	}
	dir := t.dir + "." + name
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) { //nolint:gosec // G301: as the kernel makes them
		return nil, fmt.Errorf("make cgroup %s: %w", dir, err)
	}
	return os.Open(dir)
}

// FD is the group's directory, for a process to be started in; nil for a nil Group.
func (g *Group) FD() *os.File {
	if g == nil {
		return nil
	}
	return g.fd
}

// SetWeight changes the share of processor time, see Limits. It does nothing where that cannot be limited.
func (g *Group) SetWeight(weight int) error {
	if g == nil || !g.weights {
		return nil
	}
	return write(g.dir, "cpu.weight", strconv.Itoa(min(max(weight, minWeight), maxWeight)))
}

// Close gives up the descriptor; the group stays. A nil Group has none.
func (g *Group) Close() {
	if g != nil {
		_ = g.fd.Close() // it was only read
	}
}

// Remove kills what is in the group and removes it. Nil and repeated calls are no error.
func (g *Group) Remove(ctx context.Context) error {
	if g == nil {
		return nil
	}
	g.Close()
	return remove(ctx, g.dir)
}

// Reconcile removes every group of the tree that is not kept: an earlier runner left it.
func (t *Tree) Reconcile(ctx context.Context, keep map[string]bool) error {
	if t == nil {
		return nil
	}
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if e.IsDir() && !keep[e.Name()] {
			errs = append(errs, remove(ctx, filepath.Join(t.dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// Close removes the tree if it is empty, and the groups beside it in which no process lives.
func (t *Tree) Close() error {
	if t == nil {
		return nil
	}
	beside, err := filepath.Glob(t.dir + ".*") // earlier runners' too
	errs := []error{err}
	for _, dir := range beside {
		if b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs")); err != nil || len(b) > 0 {
			continue // the group was removed, or its process stays
		}
		ctx, cancel := context.WithTimeout(context.Background(), reapTime)
		errs = append(errs, awaitRemoved(ctx, dir))
		cancel()
	}
	if err := os.Remove(t.dir); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.EBUSY) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// reapTime is how long Close waits until a process that has ended was reaped.
const reapTime = 10 * time.Second

// remove ends a group.
func remove(ctx context.Context, dir string) error {
	err := write(dir, "cgroup.kill", "1")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return awaitRemoved(ctx, dir)
}

// awaitRemoved removes a group whose processes have ended. The kernel lets a directory go once the last one has been reaped, and announces
// that.
func awaitRemoved(ctx context.Context, dir string) error {
	const interval = 5 * time.Millisecond // events are not announced when a zombie is reaped
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup %s: %w", dir, context.Cause(ctx))
		case <-timer.C:
		}
		err := os.Remove(dir)
		if err == nil || errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
		timer.Reset(interval)
	}
}

// write writes a file of a group, which the kernel has made or nobody has.
func write(dir, file, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	_, err = f.WriteString(value)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	return nil
}
