package checkpoints

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/procfs"
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
	p.DeltaBytes, p.Carried, p.Room = cmp.Or(p.DeltaBytes, 64<<20), cmp.Or(p.Carried, 1), cmp.Or(p.Room, 1.0/4)
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

// RebaserConfig has what a Rebaser needs. All fields are required.
type RebaserConfig struct {
	Policy      RebasePolicy // the zero value is the measured default
	DataDir     string
	Checkpoints *Store
	// Mapped says that VMMs map a base from its file. Otherwise each base in use is in memory.
	Mapped bool
	Life   context.Context //nolint:containedctx // the lifetime of the runner
	// Go runs background work. The runner waits for it when it ends.
	Go  func(func())
	Log *slog.Logger
}

// Rebaser replaces bases and deltas of checkpoints in the background.
type Rebaser struct {
	cfg RebaserConfig

	mu      sync.Mutex                // guards what follows
	forks   map[core.CheckpointID]int // children since the last rebase
	running bool
}

// NewRebaser returns a Rebaser that has not counted a fork yet.
func NewRebaser(cfg RebaserConfig) *Rebaser {
	cfg.Policy = cfg.Policy.withDefaults()
	return &Rebaser{cfg: cfg, forks: make(map[core.CheckpointID]int)}
}

// Consider counts the children of a checkpoint and starts a rebase if the policy wants one. Only one rebase runs at a time: it reads and
// writes a whole image, and its benefit can wait. renew is called with the new base while this base is open. The caller is an operation of the
// runner, so the runner does not end meanwhile.
func (b *Rebaser) Consider(ckpt *Opened, children int, renew func(core.BaseID)) {
	if ckpt.Delta == nil || b.cfg.Policy.Off {
		return
	}
	baseBytes, err := b.cfg.Checkpoints.bases.AllocatedBytes(ckpt.Base)
	if err != nil {
		return // it was rebased or removed meanwhile
	}
	room, err := b.baseRoom()
	if err != nil {
		b.cfg.Log.Warn("no checkpoint is rebased", "err", err)
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.forks[ckpt.ID] += children
	weighed := carried{delta: ckpt.DeltaBytes, base: baseBytes, forks: b.forks[ckpt.ID], room: room}
	if b.running || b.cfg.Life.Err() != nil || !b.cfg.Policy.wants(weighed) {
		return
	}
	b.running = true
	delete(b.forks, ckpt.ID)
	id := ckpt.ID
	b.cfg.Go(func() {
		base, err := b.rebase(id)
		if base != nil {
			renew(base.ID)
			err = errors.Join(err, base.Close())
		}
		b.mu.Lock()
		b.running = false
		b.mu.Unlock()
		if err != nil && core.CategoryOf(err) != core.NotFound {
			b.cfg.Log.Warn("checkpoint was not rebased", "checkpoint_id", id, "err", err)
		}
	})
}

// Forget drops the count of a checkpoint's forks.
func (b *Rebaser) Forget(id core.CheckpointID) {
	b.mu.Lock()
	delete(b.forks, id)
	b.mu.Unlock()
}

// baseRoom is how many bytes bases may take: of the disk, and also of memory if each base is a memfd.
func (b *Rebaser) baseRoom() (int64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(b.cfg.DataDir, &fs); err != nil {
		return 0, fmt.Errorf("examine the data directory: %w", err)
	}
	room := int64(fs.Bavail) * fs.Bsize
	if b.cfg.Mapped {
		return room, nil
	}
	free, err := availableMemory()
	return min(room, free), err
}

// availableMemory is how much memory the kernel could provide without swapping, in bytes.
func availableMemory() (int64, error) {
	kib, err := procfs.KiB("/proc/meminfo", "MemAvailable")
	return kib << 10, err
}

// Rebase replaces a checkpoint's base and delta by a new base with the same bytes. Sandboxes on the old base continue to use it. A
// checkpoint without a delta does not change.
func (b *Rebaser) Rebase(id core.CheckpointID) error {
	base, err := b.rebase(id)
	if base != nil {
		err = errors.Join(err, base.Close())
	}
	return err
}

// rebase is Rebase; it returns the new base, open, if there is one.
func (b *Rebaser) rebase(id core.CheckpointID) (_ *memory.Base, err error) {
	s := b.cfg.Checkpoints
	ckpt, err := s.Open(id)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, ckpt.Close()) }()
	if ckpt.Delta == nil {
		return nil, nil
	}
	release := s.HoldBases()
	defer func() { err = errors.Join(err, release()) }()
	base, err := s.bases.Rebase(ckpt.Memory, ckpt.Delta)
	if err != nil {
		return nil, err
	}
	if err := rebaseAfterBase.Hit(b.cfg.Life); err != nil {
		return nil, errors.Join(err, base.Close())
	}
	s.RetainBase(base.ID)
	rec := *ckpt.Record
	rec.Base, rec.Rebased, rec.DeltaBytes = base.ID, true, 0
	err = s.replace(b.cfg.Life, &rec)
	if err = errors.Join(err, s.ReleaseBase(base.ID)); err != nil {
		return nil, errors.Join(err, base.Close())
	}
	b.cfg.Log.Info("checkpoint rebased", "checkpoint_id", id, "base_id", base.ID, "bytes", ckpt.DeltaBytes)
	return base, nil
}
