// Package leftovers finds and removes what nobody uses any more on a host: shells of an earlier runner, and directories that could not be
// removed. Shells that can still be used are not leftovers: the successor of their runner adopts them.
package leftovers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/cgroup"
	"github.com/coppice-dev/coppice/runner/journal"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// Host says where a runner has its shells. Fields without a note are required.
type Host struct {
	RunDir    string // with a directory for each shell, which has its journal and sockets
	ShellsDir string // with a directory for each shell, which has its disk
	ClusterID string
	Mark      string // of everything on this host that belongs to the cluster
	Drivers   Drivers
	Cgroups   *cgroup.Tree // nil on a host without cgroup v2
	// Network removes every namespace of the cluster that is not kept.
	Network interface {
		Reconcile(ctx context.Context, keep map[string]bool) error
	}
	Log *slog.Logger
}

// Drivers are the VMMs that a runner knows.
type Drivers struct {
	Own    vmm.Driver
	Name   string                // of Own
	Others map[string]vmm.Driver // by name: an earlier runner may have used them
}

// Of returns the driver that knows a machine: an earlier runner may have started it on another VMM than this runner uses. If no driver
// knows the machine, it returns the runner's own driver.
func (d Drivers) Of(h vmm.Handle) (driver vmm.Driver, known bool) {
	if h.Driver == d.Name {
		return d.Own, true
	}
	if other, ok := d.Others[h.Driver]; ok {
		return other, true
	}
	return d.Own, false
}

// all are all drivers that an earlier runner may have used.
func (d Drivers) all() []vmm.Driver {
	list := []vmm.Driver{d.Own}
	for _, name := range slices.Sorted(maps.Keys(d.Others)) {
		if name != d.Name {
			list = append(list, d.Others[name])
		}
	}
	return list
}

// Leftover is a shell, or a part of one, that an earlier runner has left.
type Leftover struct {
	Name    string           // of its directories
	Journal *journal.Journal // nil if it cannot be used
}

// Adoptable reports whether it may be a sandbox that a successor can adopt. A sandbox that was not ready was never released, and a
// shell that is not a sandbox is no longer needed.
func (l Leftover) Adoptable() bool {
	j := l.Journal
	return j != nil && j.Handle != nil && j.Sandbox != nil && j.Sandbox.Info.State == runnerapi.SandboxReady
}

// UsesPager reports whether it has memory from a pager.
func (l Leftover) UsesPager() bool { return l.Journal != nil && l.Journal.Pager != "" }

// Scan finds what earlier runners have left in both directories. If it finds a journal of another cluster, the directory is not
// this runner's, and Scan returns an error. It changes nothing.
func (h Host) Scan() ([]Leftover, error) {
	var list []Leftover
	seen := map[string]bool{}
	for _, dir := range []string{h.RunDir, h.ShellsDir} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if _, err := core.ParseID[core.SandboxID](e.Name()); err != nil || !e.IsDir() || seen[e.Name()] {
				continue
			}
			seen[e.Name()] = true
			j, err := journal.Read(filepath.Join(h.RunDir, e.Name()), h.ClusterID)
			if unusable, ok := errors.AsType[journal.UnusableError](err); ok {
				h.Log.Warn("journal of a sandbox is not understood", "shell_id", e.Name(), "version", unusable.Version)
			} else if err != nil {
				return nil, err
			}
			list = append(list, Leftover{e.Name(), j})
		}
	}
	return list, nil
}

// Kept is a shell of an earlier runner that stays.
type Kept struct {
	ID        core.SandboxID
	Namespace string
	Handle    vmm.Handle
}

// endTime is how long the machines of an earlier runner may take to end. A process ends within milliseconds of SIGKILL, unless the kernel
// waits for something in it.
const endTime = time.Minute

var errUnending = fmt.Errorf("it has not ended %s after SIGKILL: the kernel waits for its disk or for its memory; start the runner again when that is back", endTime)

// TakeDown takes down what an earlier runner left and the present one does not keep: what the journals name, and everything on this host with
// the mark of the cluster. It ends the VMMs first, because nothing may be removed that a living VMM uses.
func (h Host) TakeDown(ctx context.Context, doomed []Leftover, kept []Kept) error {
	stray, err := h.endMachines(ctx, doomed, kept)
	if err != nil {
		return err
	}
	groups, namespaces := map[string]bool{}, map[string]bool{}
	for _, k := range kept {
		groups[string(k.ID)], namespaces[k.Namespace] = true, true
	}
	errs := []error{h.Cgroups.Reconcile(ctx, groups), h.Network.Reconcile(ctx, namespaces)}
	for _, l := range doomed {
		// The journal is removed last: if the runner ends in between, the next one finds the rest.
		errs = append(errs, os.RemoveAll(filepath.Join(h.ShellsDir, l.Name)), os.RemoveAll(filepath.Join(h.RunDir, l.Name)))
	}
	if len(doomed)+stray > 0 {
		h.Log.WarnContext(ctx, "took down what an earlier runner left", "shells", len(doomed), "stray_vmms", stray)
	}
	return errors.Join(errs...)
}

// endMachines ends the VMMs of doomed shells, and those that no journal names.
func (h Host) endMachines(ctx context.Context, doomed []Leftover, kept []Kept) (stray int, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, endTime, errUnending)
	defer cancel()
	var errs []error
	for _, l := range doomed {
		if l.Journal != nil && l.Journal.Handle != nil {
			driver, _ := h.Drivers.Of(*l.Journal.Handle) // a machine of an unknown driver is ended as a process
			errs = append(errs, driver.End(ctx, *l.Journal.Handle))
		}
	}
	handles := make([]vmm.Handle, 0, len(kept))
	for _, k := range kept {
		handles = append(handles, k.Handle)
	}
	for _, driver := range h.Drivers.all() {
		n, err := driver.Reap(ctx, h.Mark, handles)
		stray, errs = stray+n, append(errs, err)
	}
	return stray, errors.Join(errs...)
}
