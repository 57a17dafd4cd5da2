package runner

import (
	"context"
	"os"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/compare"
	"github.com/coppice-dev/coppice/runner/fetch"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/lease"
	"github.com/coppice-dev/coppice/runner/roots"
	"github.com/coppice-dev/coppice/runner/sealing"
)

// openLazy opens the images that an earlier runner has begun to fetch.
func openLazy(r *Runner) (*lazy.Images, error) {
	return lazy.Open(r.runCtx, lazy.Config{
		DataDir: r.cfg.DataDir, Pager: r.cfg.Store.Pager, Whole: r.cfg.Store.Whole, Room: r.room, Keys: &r.keys, Log: r.cfg.Log, Host: lazyHost{r},
	})
}

// openCheckpoints opens the checkpoints of this host. Each base in retained has a sandbox.
func openCheckpoints(r *Runner, retained []core.BaseID) (*checkpoints.Store, error) {
	return checkpoints.New(checkpoints.Config{
		DataDir: r.cfg.DataDir, Bases: r.bases, Enter: r.enter, Removed: r.roots.Collect, Log: r.cfg.Log,
		Published: func() { r.seals.Poke() },
		Forgotten: func(id core.CheckpointID) {
			r.rebases.Forget(id)
			r.seals.Forget(id)
			r.prepared.Removed(id)
		},
	}, retained)
}

func newRebaser(r *Runner) *checkpoints.Rebaser {
	return checkpoints.NewRebaser(checkpoints.RebaserConfig{
		Policy: r.cfg.Rebase, DataDir: r.cfg.DataDir, Checkpoints: r.checkpoints, Mapped: r.cfg.Driver.Capabilities().ReadOnlyBase,
		Life: r.runCtx, Go: r.wg.Go, Log: r.cfg.Log,
	})
}

// newSealer finds out which checkpoints are sealed.
func newSealer(r *Runner) *sealing.Sealer {
	return sealing.New(sealing.Config{
		DataDir: r.cfg.DataDir, Blobs: r.blobs, Keys: &r.keys, Throttle: r.cfg.Store.Throttle, Checkpoints: r.checkpoints, Bases: r.bases, Roots: r.roots,
		Incomplete: r.lazy, WorkingSets: &r.lazy.WorkingSets, Rehearsals: rehearsals{r}, WhileLeased: r.lease.While, Fenced: lease.ErrFenced, Log: r.cfg.Log,
		Room: r.room, Enter: r.enter,
	})
}

// newFetcher returns what brings checkpoints to this host.
func newFetcher(r *Runner) *fetch.Fetcher {
	return fetch.New(fetch.Config{
		DataDir: r.cfg.DataDir, Blobs: r.blobs, Copies: r.cfg.Store.Copies, Images: r.cfg.Images, Checkpoints: r.checkpoints, Bases: r.bases, Roots: r.roots,
		Lazy: r.lazy, Room: r.room, Uploads: r.seals, Compatible: r.compatible, Sandboxes: r.uses, Wake: r.wake, Life: r.runCtx, Stopping: errStopping, Log: r.cfg.Log,
	})
}

// uses is what the living sandboxes use.
func (r *Runner) uses() []fetch.Use {
	var out []fetch.Use
	for _, s := range r.all() {
		out = append(out, fetch.Use{Checkpoint: s.snapshot().Checkpoint, Base: s.shape.base, Root: s.shape.RootKey()})
	}
	return out
}

// newComparer returns what compares checkpoints of this host.
func newComparer(r *Runner) *compare.Comparer {
	return compare.New(compare.Config{
		Checkpoints: r.checkpoints, Roots: r.roots, Images: r.lazy, Enter: r.enter, Life: r.runCtx, Stopping: errStopping, Log: r.cfg.Log,
	})
}

// openRoots opens the root file systems of this host.
func openRoots(r *Runner) (*roots.Store, error) {
	return roots.New(r.runCtx, roots.Config{DataDir: r.cfg.DataDir, Images: r.cfg.Images, Lazy: r.lazy, Wanted: r.wantedRoots, Log: r.cfg.Log})
}

// wantedRoots are the root file systems that checkpoints and sandboxes need.
func (r *Runner) wantedRoots() map[roots.Key]bool {
	wanted := make(map[roots.Key]bool)
	for _, rec := range r.checkpoints.List() {
		wanted[rec.RootKey()] = true
	}
	for _, t := range r.checkpoints.ListTrash() {
		wanted[t.Record.RootKey()] = true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.sandboxes {
		wanted[s.shape.RootKey()] = true
	}
	return wanted
}

// lazyHost implements lazy.Host.
type lazyHost struct{ r *Runner }

var _ lazy.Host = lazyHost{}

// OpenBase implements lazy.Host.
func (h lazyHost) OpenBase(id core.BaseID) (*os.File, error) { return h.r.bases.OpenFile(id) }

// ImageArrived implements lazy.Host: a checkpoint that lacked the image can be uploaded.
func (h lazyHost) ImageArrived() { h.r.seals.ImageArrived() }

// EndMachines implements lazy.Host.
func (h lazyHost) EndMachines(ctx context.Context, why string, match func(lazy.Machine) bool) {
	for _, s := range h.r.all() {
		if !match(s.lazyMachine()) {
			continue
		}
		h.r.cfg.Log.ErrorContext(ctx, "sandbox is ended", "sandbox_id", s.info.ID, "reason", why)
		if err := s.end(ctx, why); err != nil {
			h.r.cfg.Log.ErrorContext(ctx, "sandbox was not ended", "sandbox_id", s.info.ID, "err", err)
		}
	}
}

// PagerEnded implements lazy.Host: it drops open bases and warm shells that have memory from the pager.
func (h lazyHost) PagerEnded(ctx context.Context, instance string) {
	h.r.bases.ForgetArriving()
	h.r.warm.Purge(ctx, func(s *shell) bool { return s.Pager == instance })
}

// lazyMachine says which images the sandbox's machine uses.
func (s *sandbox) lazyMachine() lazy.Machine {
	return lazy.Machine{ID: s.info.ID, Pager: s.Pager, Base: s.shape.base, Root: string(s.shape.RootKey())}
}

func rootImageID(k roots.Key) string { return lazy.RootID(string(k)) }
