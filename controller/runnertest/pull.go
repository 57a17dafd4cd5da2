package runnertest

import (
	"context"
	"slices"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/pulls"
)

// SetPull makes the runner pull images by work, with the same bookkeeping as a real runner. The image of a pull that ends is in its list.
func (r *Runner) SetPull(work pulls.Work) {
	p := pulls.New(func(ctx context.Context, in runnerapi.Pull, report func(runnerapi.PullState)) (runnerapi.PullState, error) {
		state, err := work(ctx, in, report)
		if err == nil {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.cfg.Images = append(slices.Clip(r.cfg.Images), runnerapi.Image{Digest: state.Image, CreatedAt: r.started, Unlisted: true})
		}
		return state, err
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pulls = p
}

// pull serves runnerapi.PathPull.
func (r *Runner) pull(id core.OperationID, in runnerapi.Pull) (runnerapi.PullState, error) {
	r.mu.Lock()
	p := r.pulls
	r.mu.Unlock()
	return p.Pull(id, in)
}
