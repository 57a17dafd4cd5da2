package runner

import (
	"context"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/warm"
)

func newWarmPool(r *Runner) *warm.Pool[shape, *shell] {
	return warm.New(warm.Config[shape, *shell]{
		Keep: r.cfg.Warm, For: r.cfg.WarmFor, Make: r.coldShell, TakeDown: r.dismantle, Dead: (*shell).dead, Busy: r.busy, Log: r.cfg.Log,
	})
}

// dead reports whether the VMM of a shell has ended.
func (s *shell) dead() bool {
	select {
	case <-s.machine.Done():
		return true
	default:
		return false
	}
}

// busy reports whether forks are under way.
func (r *Runner) busy() bool { return len(r.starting) > 0 }

// shapeOf is the shape of the shells that can become a checkpoint.
func shapeOf(ckpt *checkpoints.Opened) (shape, error) {
	info, err := ckpt.Overlay.Stat()
	if err != nil {
		return shape{}, err
	}
	res := ckpt.Resources
	res.DiskGiB = 0
	return shape{base: ckpt.Base, image: ckpt.Image, root: ckpt.Root, resources: res, diskBytes: info.Size()}, nil
}

// takeShell returns a shell for the checkpoint: a warm one, or a new one.
func (r *Runner) takeShell(ctx context.Context, ckpt *checkpoints.Opened) (*shell, error) {
	sh, err := shapeOf(ckpt)
	if err != nil {
		return nil, err
	}
	if s, ok := r.warm.Take(sh); ok {
		s.timings = nil // this time had passed before the fork was requested
		return s, nil
	}
	return r.neededShell(ctx, sh, ckpt.Memory, nil)
}

// neededShell makes a shell that somebody waits for. On a full host, machines that nobody waits for give way to it.
func (r *Runner) neededShell(ctx context.Context, sh shape, base *memory.Base, b *boot) (*shell, error) {
	s, err := r.newShell(ctx, sh, base, b)
	for err != nil && core.CategoryOf(err) == core.Exhausted && (r.prepared.MakeRoom(ctx) || r.warm.MakeRoom(ctx)) {
		s, err = r.newShell(ctx, sh, base, b)
	}
	return s, err
}

func (r *Runner) coldShell(ctx context.Context, sh shape) (*shell, error) {
	base, err := r.bases.Open(sh.base)
	if err != nil {
		return nil, err
	}
	defer base.Close()
	return r.newShell(ctx, sh, base, nil)
}

// forked is called when a fork of a checkpoint has ended.
func (r *Runner) forked(ckpt *checkpoints.Opened, children []runnerapi.Child) {
	if n := len(children); n > 0 {
		r.prepared.Forked(ckpt.ID, n, children[n-1].CA)
	}
	sh, err := shapeOf(ckpt)
	if err == nil {
		r.warm.Want(sh)
	}
	r.rebases.Consider(ckpt, len(children), func(base core.BaseID) {
		if err != nil {
			return
		}
		// Loading a large base takes as long as the injection of the delta did. The next fork must not wait for it.
		rebased := sh
		rebased.base = base
		r.warm.Renew(r.runCtx, rebased)
	})
}
