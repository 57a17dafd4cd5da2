package runner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/internal/undo"
	"github.com/coppice-dev/coppice/runner/cgroup"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/journal"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/roots"
	"github.com/coppice-dev/coppice/runner/sandboxnet"
	"github.com/coppice-dev/coppice/runner/sequence"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// constantMAC is in the configuration of every machine, because a capture contains it. The reseal sets the guest's real MAC, and
// the rules of the namespace pin it.
const constantMAC = "02:c0:99:1c:e0:02"

// shape has what all machines of a base have in common: a shell can become any checkpoint of the same shape.
type shape struct {
	base      core.BaseID
	image     core.Digest
	root      roots.Key      // empty: the image's own
	resources core.Resources // DiskGiB is 0 here: disks are sized by bytes
	diskBytes int64
}

func (s shape) RootKey() roots.Key { return cmp.Or(s.root, roots.Own(s.image)) }

// shell is a VMM that waits on a base: a machine without a state.
type shell struct {
	journal.Shell

	shape   shape
	dir     string // files: overlay
	runDir  string // sockets, journal
	overlay *os.File
	base    *memory.Base
	ns      sandboxnet.Namespace
	group   *cgroup.Group
	machine vmm.Machine
	made    time.Time
	timings []core.Timing
}

// writeJournal writes the shell's journal, with the part for a sandbox if the shell is one.
func (s *shell) writeJournal(sandbox *journal.Sandbox) error {
	s.Shape = journal.Shape{Base: s.shape.base, Image: s.shape.image, Root: s.shape.root, Resources: s.shape.resources, DiskBytes: s.shape.diskBytes}
	return journal.Write(s.runDir, s.Shell, sandbox)
}

// limits bounds a VMM's memory besides the guest's RAM: QEMU under TCG has a translation cache of its own. A VM's weight depends on
// its vCPUs, so that small VMs do not starve a large one.
func (c Config) limits(res core.Resources) cgroup.Limits {
	const overheadMiB, threads, weight = 1024, 256, 100
	return cgroup.Limits{
		MemoryBytes: int64(res.MemoryMiB+overheadMiB) << 20, Processes: threads, Weight: weight * res.VCPUs,
		CPUPercent: c.Limits.CPUPercent * res.VCPUs, IOBytes: c.Limits.IOBytes, IOPS: c.Limits.IOPS,
	}
}

// boot has what a cold boot needs in addition. A shell without it waits for a restore.
type boot struct {
	commandLine     string
	kernel, initrd  *os.File
	overlayTemplate *os.File
}

// newShell starts a VMM on a base. The caller has the base open, and the shell opens it again for itself. After an error nothing
// is left.
func (r *Runner) newShell(ctx context.Context, sh shape, base *memory.Base, b *boot) (_ *shell, err error) {
	watch := core.NewStopwatch()
	slot, err := r.slots.Take()
	if err != nil {
		return nil, err
	}
	id := core.NewID[core.SandboxID]()
	s := &shell{
		Shell: journal.Shell{ID: id, ClusterID: r.cfg.ClusterID, Slot: slot, Class: r.class},
		shape: sh, dir: filepath.Join(r.shellsDir(), string(id)), runDir: filepath.Join(r.cfg.RunDir, string(id)),
	}
	var done undo.Stack
	defer func() { err = done.Settle(ctx, err) }()
	done.Push("slot", func(context.Context) error { r.slots.Give(slot); return nil })
	done.Push("directories", func(context.Context) error { return r.directories.Remove(s.runDir, s.dir) })
	if err := sequence.Run(ctx, watch, []sequence.Step{
		{Does: "make the directories", Then: shellJournaled, Do: s.makeDirs},
		{Does: "retain the base", Do: func(context.Context) error { return s.retainBase(r, base, &done) }},
		{Does: "acquire a namespace", Then: shellNamespace, Do: func(ctx context.Context) error { return s.acquire(ctx, r.cfg.Network, &done) }},
		{Does: "note the namespace", Lap: "net", Do: func(context.Context) error { return s.writeJournal(nil) }},
		{Does: "make the disk", Lap: "disk", Do: func(context.Context) error { return s.makeOverlay(b, &done) }},
		{Does: "make the control group", Then: shellCgroup, Do: func(context.Context) error { return s.makeGroup(r.cfg, &done) }},
		{Does: "start the VMM", Then: shellSpawned, Do: func(ctx context.Context) error { return s.start(ctx, r, b, &done) }},
		{Does: "complete the journal", Lap: "vmm", Then: shellMade, Do: s.noteHandle},
	}); err != nil {
		return nil, fmt.Errorf("make shell %s: %w", id, err)
	}
	s.timings, s.made = watch.Timings(), time.Now()
	return s, nil
}

func (s *shell) makeDirs(context.Context) error {
	if err := os.Mkdir(s.runDir, 0o700); err != nil {
		return err
	}
	return errors.Join(s.writeJournal(nil), os.Mkdir(s.dir, 0o700))
}

func (s *shell) acquire(ctx context.Context, from sandboxnet.Network, done *undo.Stack) (err error) {
	if s.ns, err = from.Acquire(ctx); err != nil {
		return err
	}
	done.Push("namespace", s.ns.Release)
	s.Namespace = s.ns.Name()
	return nil
}

func (s *shell) makeGroup(cfg Config, done *undo.Stack) (err error) {
	if s.group, err = cfg.Cgroups.Make(string(s.ID), cfg.limits(s.shape.resources)); err != nil {
		return err
	}
	done.Push("cgroup", s.group.Remove)
	return nil
}

func (s *shell) start(ctx context.Context, r *Runner, b *boot, done *undo.Stack) error {
	if err := s.spawn(ctx, r, b); err != nil {
		return err
	}
	done.Push("vmm", s.machine.Kill)
	return nil
}

func (s *shell) noteHandle(context.Context) error {
	h := s.machine.Handle()
	s.Handle = &h
	return s.writeJournal(nil)
}

func (s *shell) retainBase(r *Runner, base *memory.Base, steps *undo.Stack) error {
	s.base = base
	if base.ID == "" { // the zero base of a cold boot is needed only until its only machine has started
		return nil
	}
	r.checkpoints.RetainBase(base.ID)
	opened, err := r.bases.Open(base.ID)
	if err != nil {
		return errors.Join(err, r.checkpoints.ReleaseBase(base.ID))
	}
	s.base = opened
	s.Pager = r.lazy.InstanceFor(opened.Arriving(), string(s.shape.RootKey()))
	steps.Push("base", func(context.Context) error {
		return errors.Join(opened.Close(), r.checkpoints.ReleaseBase(base.ID))
	})
	return nil
}

// makeOverlay makes the writable disk: of the right size, and with the image's empty file system for a cold boot.
func (s *shell) makeOverlay(b *boot, steps *undo.Stack) error {
	f, err := os.OpenFile(filepath.Join(s.dir, checkpoints.OverlayFile), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	steps.Push("overlay", func(context.Context) error { return f.Close() })
	s.overlay = f
	if b != nil {
		if _, err := sparse.Clone(f, b.overlayTemplate); err != nil {
			return err
		}
	}
	return f.Truncate(s.shape.diskBytes)
}

func (s *shell) spawn(ctx context.Context, r *Runner, b *boot) error {
	root, err := r.roots.Open(s.shape.RootKey())
	if err != nil {
		return err
	}
	defer root.Close()
	tap, err := s.ns.TapFile(r.cfg.Driver.Capabilities().TapUp)
	if err != nil {
		return err
	}
	if tap != nil {
		defer tap.Close()
	}
	netns, err := s.ns.NetNS()
	if err != nil {
		return err
	}
	if netns != nil {
		defer netns.Close()
	}
	spec := vmm.Spec{
		ID: s.ID, Cluster: r.clusterHash, Dir: s.runDir,
		VCPUs: s.shape.resources.VCPUs, MemoryMiB: s.shape.resources.MemoryMiB, Base: s.base.File(),
		Disks: []vmm.Disk{{File: root, ReadOnly: true, Serial: "root"}, {File: s.overlay, Serial: "overlay"}},
		Tap:   tap, MAC: constantMAC, NetNS: netns, CgroupFD: s.group.FD(), Restore: b == nil,
	}
	if r.cfg.FirstUID != 0 {
		spec.UID, spec.GID = r.cfg.FirstUID+uint32(s.Slot), r.cfg.FirstUID+uint32(s.Slot)
	}
	if b != nil {
		spec.Kernel, spec.Initrd, spec.CommandLine = b.kernel, b.initrd, b.commandLine
	}
	s.machine, err = r.cfg.Driver.Spawn(ctx, spec)
	return err
}

// letGo closes what the runner has open of a shell that continues to live.
func (s *shell) letGo() {
	_ = s.overlay.Close() // the VMM has its own
	s.group.Close()
	if s.base.ID != "" {
		_ = s.base.Close() // likewise
	}
}

// dismantle takes a shell down completely: VMM, namespace, files. It continues after an error, and can be repeated.
func (r *Runner) dismantle(ctx context.Context, s *shell) error {
	if err := s.machine.Kill(ctx); err != nil {
		return fmt.Errorf("take down shell %s: %w", s.ID, err) // nothing else may be removed while the VMM lives
	}
	var errs []error
	errs = append(errs, s.group.Remove(ctx), s.ns.Release(ctx), s.overlay.Close(), r.directories.Remove(s.runDir, s.dir))
	if s.base.ID != "" {
		errs = append(errs, s.base.Close(), r.checkpoints.ReleaseBase(s.base.ID))
	}
	r.slots.Give(s.Slot)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("take down shell %s: %w", s.ID, err)
	}
	return nil
}
