package fleet

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/imageref"
	"github.com/coppice-dev/coppice/internal/pace"
)

const (
	pullChoices = 8 // runners among which the reference chooses
	pullPause   = 500 * time.Millisecond
)

// MayPull reports whether an image that no runner has is looked for in a registry.
func (f *Fleet) MayPull(ref string) bool {
	return !f.cfg.Registries.None() && imageref.IsExplicit(ref)
}

// Pull has a runner make an image of one of a registry, and returns the digest of the image. id names the pull: a repeated call goes on
// with it. show hears how far it is.
func (f *Fleet) Pull(ctx context.Context, id core.OperationID, ref string, res core.Resources, show func(runnerapi.PullState)) (core.Digest, error) {
	whole, err := imageref.Whole(ref)
	if err == nil {
		err = f.cfg.Registries.Allow(ref)
	}
	if err != nil {
		return "", err
	}
	runner, err := f.puller(ctx, whole, res)
	if err != nil {
		return "", err
	}
	in := runnerapi.Pull{Reference: whole, Hosts: f.cfg.Registries.Hosts, PlainHTTP: f.cfg.Registries.PlainHTTP}
	heard := time.Now()
	for {
		state, err := f.runners.Pull(ctx, runner.Endpoint, id, in)
		switch {
		case err == nil:
			heard = time.Now()
			show(state)
		case core.CodeOf(err) == core.CodeRunnerUnreachable && ctx.Err() == nil && time.Since(heard) < f.cfg.PullRetry:
		default:
			return "", err
		}
		if err == nil && state.Done {
			return state.Image, f.learnImages(ctx, runner, state.Image)
		}
		if err := pace.Pause(ctx, pullPause); err != nil {
			return "", err
		}
	}
}

// puller chooses among the emptiest runners. A reference chooses the same one while they are the same: it has the layers already.
func (f *Fleet) puller(ctx context.Context, whole string, res core.Resources) (model.Runner, error) {
	list, err := read(ctx, f, func(tx Tx) ([]model.Runner, error) {
		return tx.EmptiestRunners(ctx, EmptiestFilter{Limit: pullChoices, NotFull: true, Fresh: true, Fits: &res})
	})
	if err != nil {
		return model.Runner{}, err
	}
	if len(list) == 0 {
		return model.Runner{}, core.Errorf(core.Unavailable, core.CodeNoRunner, "no runner has room to pull the image; wait, or add a runner")
	}
	return slices.MaxFunc(list, func(a, b model.Runner) int {
		weight := func(r model.Runner) core.Digest { return core.DigestOf([]byte(whole + " " + string(r.Info.RunnerID))) }
		return cmp.Compare(weight(a), weight(b))
	}), nil
}

// learnImages records that a runner has an image, before a workspace is placed on it.
func (f *Fleet) learnImages(ctx context.Context, r model.Runner, image core.Digest) error {
	list, err := f.runners.Images(ctx, r.Endpoint)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(list, func(i runnerapi.Image) bool { return i.Digest == image }) {
		return core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "the runner does not list the image that it has pulled")
	}
	return f.recordImages(ctx, r.Info.RunnerID, list)
}
