package runner

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
)

// RebasePolicy decides when a checkpoint's base and delta become a new base in the background. ADR 5 has the measurement
// behind the defaults.
type RebasePolicy struct {
	// Off never rebases.
	Off bool
	// DeltaBytes is the size at which a delta is rebased at its checkpoint's first fork. After that a child starts with an
	// empty delta, needs no injection, and pauses for less time at its own captures. It is an absolute size because the
	// cost of a delta depends on its bytes, not on the RAM. Default 64 MiB.
	DeltaBytes int64
	// Carried decides about smaller deltas. Such a delta is rebased when the forks together have copied as many bytes of it
	// as Carried times the size of the new base. Default 1.
	Carried float64
	// Room is the largest share of the host's free disk that the new base may take. If VMMs cannot map a base from its file,
	// it is also the largest share of the host's available memory. Default 1/4.
	Room float64
}

func (p RebasePolicy) withDefaults() RebasePolicy {
	setDefault(&p.DeltaBytes, 64<<20)
	setDefault(&p.Carried, 1)
	setDefault(&p.Room, 1.0/4)
	return p
}

// carried has the numbers from which the policy decides.
type carried struct {
	delta int64 // bytes
	base  int64 // bytes that the present base has allocated
	forks int   // children that the checkpoint has had
	room  int64 // bytes that the host could give to bases
}

// wants is the policy, as a pure function.
func (p RebasePolicy) wants(c carried) bool {
	fresh := float64(c.base + c.delta)
	switch {
	case p.Off || c.delta == 0 || fresh > p.Room*float64(c.room):
		return false
	case c.delta >= p.DeltaBytes:
		return c.forks > 0
	}
	return float64(c.delta)*float64(c.forks) >= p.Carried*fresh
}

// considerRebase counts the children of a checkpoint and starts a rebase if the policy wants one. Only one rebase runs at a time: it
// reads and writes a whole image, and its benefit can wait.
func (r *Runner) considerRebase(ckpt *opened, children int) {
	if ckpt.delta == nil || r.cfg.Rebase.Off {
		return
	}
	baseBytes, err := r.bases.AllocatedBytes(ckpt.Base)
	if err != nil {
		return // it was rebased or removed meanwhile
	}
	room, err := r.baseRoom()
	if err != nil {
		r.cfg.Log.Warn("no checkpoint is rebased", "err", err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forks[ckpt.ID] += children
	weighed := carried{delta: ckpt.DeltaBytes, base: baseBytes, forks: r.forks[ckpt.ID], room: room}
	if r.rebasing || r.runCtx.Err() != nil || !r.cfg.Rebase.wants(weighed) {
		return
	}
	r.rebasing = true
	delete(r.forks, ckpt.ID)
	id := ckpt.ID
	old, shapeErr := shapeOf(ckpt)
	r.wg.Go(func() {
		base, err := r.rebase(id)
		if base != nil {
			if shapeErr == nil {
				// Loading a large base takes as long as the injection of the delta did. The next fork must not wait for it.
				old.base = base.ID
				r.warm.renew(r.runCtx, old)
			}
			err = errors.Join(err, base.Close())
		}
		r.mu.Lock()
		r.rebasing = false
		r.mu.Unlock()
		if err != nil && core.CategoryOf(err) != core.NotFound {
			r.cfg.Log.Warn("checkpoint was not rebased", "checkpoint_id", id, "err", err)
		}
	})
}

// baseRoom is how many bytes bases may take: of the disk, and of memory where each is a memfd.
func (r *Runner) baseRoom() (int64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(r.cfg.DataDir, &fs); err != nil {
		return 0, fmt.Errorf("examine the data directory: %w", err)
	}
	room := int64(fs.Bavail) * fs.Bsize
	if r.cfg.Driver.Capabilities().ReadOnlyBase {
		return room, nil
	}
	free, err := availableMemory()
	return min(room, free), err
}

// availableMemory is how much memory the kernel could provide without swapping, in bytes.
func availableMemory() (int64, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		var kib int64
		if n, _ := fmt.Sscanf(line, "MemAvailable: %d kB", &kib); n == 1 {
			return kib << 10, nil
		}
	}
	return 0, core.Errorf(core.Internal, core.CodeInternal, "/proc/meminfo does not say how much memory is available")
}

// Rebase replaces a checkpoint's base and delta by a new base with the same bytes. Sandboxes on the old base continue to use it. A
// checkpoint without a delta does not change.
func (r *Runner) Rebase(id core.CheckpointID) error {
	base, err := r.rebase(id)
	if base != nil {
		err = errors.Join(err, base.Close())
	}
	return err
}

// rebase is Rebase; it returns the new base, open, if there is one.
func (r *Runner) rebase(id core.CheckpointID) (_ *memory.Base, err error) {
	ckpt, err := r.checkpoints.open(id)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, ckpt.close()) }()
	if ckpt.delta == nil {
		return nil, nil
	}
	release := r.checkpoints.holdBases()
	defer func() { err = errors.Join(err, release()) }()
	base, err := r.bases.Rebase(ckpt.base, ckpt.delta)
	if err != nil {
		return nil, err
	}
	if err := rebaseAfterBase.Hit(r.runCtx); err != nil {
		return nil, errors.Join(err, base.Close())
	}
	r.checkpoints.lend(base.ID)
	rec := *ckpt.checkpointRecord
	rec.Base, rec.Rebased, rec.DeltaBytes = base.ID, true, 0
	err = r.checkpoints.replace(r.runCtx, &rec)
	if err = errors.Join(err, r.checkpoints.giveBack(base.ID)); err != nil {
		return nil, errors.Join(err, base.Close())
	}
	r.cfg.Log.Info("checkpoint rebased", "checkpoint_id", id, "base_id", base.ID, "bytes", ckpt.DeltaBytes)
	return base, nil
}

// forgetForks drops the count of a checkpoint's forks.
func (r *Runner) forgetForks(id core.CheckpointID) {
	r.mu.Lock()
	delete(r.forks, id)
	r.mu.Unlock()
}
