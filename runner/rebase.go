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
	// DeltaBytes is the size from which on a delta is rebased at its checkpoint's first fork: a child then starts with an
	// empty delta, is injected for nothing, and pauses for less at its own captures. It is an absolute size because all
	// that a delta costs follows its bytes, whatever the RAM. Default 64 MiB.
	DeltaBytes int64
	// Carried is how often the bytes of the new base its forks must carry, in copies of the delta, before a smaller delta
	// is worth one more base. Default 1.
	Carried float64
	// Room is the largest share of the host's free disk, and of its available memory where VMMs cannot map a base from its
	// file, that the new base may take. Default 1/4.
	Room float64
}

func (p RebasePolicy) withDefaults() RebasePolicy {
	setDefault(&p.DeltaBytes, 64<<20)
	setDefault(&p.Carried, 1)
	setDefault(&p.Room, 1.0/4)
	return p
}

// carried is what the policy weighs.
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

// considerRebase counts the children of a checkpoint and starts a rebase when the policy wants one. One runs at a time: it
// reads and writes a whole image, and what it improves can wait.
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
				// Loading a large base takes as long as injecting the delta did: not in the way of the next fork.
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

// availableMemory is what the kernel could give away without swapping, in bytes.
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

// Rebase replaces a checkpoint's base and delta by a new base with the same bytes. Sandboxes on the old base go on on it. A
// checkpoint without a delta is left as it is.
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

// forgetForks drops what was counted of a checkpoint.
func (r *Runner) forgetForks(id core.CheckpointID) {
	r.mu.Lock()
	delete(r.forks, id)
	r.mu.Unlock()
}
