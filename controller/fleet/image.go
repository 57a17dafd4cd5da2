package fleet

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/imageref"
)

// askedImages bounds the runners that one request asks for their images.
const askedImages = 8

// imageRefresh bounds the time of a request for a runner's images after a heartbeat.
const imageRefresh = 10 * time.Second

// ImageTx keeps the images of runners.
type ImageTx interface {
	// EmptiestRunners returns runners that take new sandboxes, the emptiest first, each with its load. It compares loads in sixteenths.
	EmptiestRunners(ctx context.Context, f EmptiestFilter) ([]model.Runner, error)
	// FindImage returns the newest image of a name or of a whole reference, or the one with a digest, that a runner with a lease has;
	// IMAGE_NOT_FOUND.
	FindImage(ctx context.Context, ref string) (model.Image, error)
	// Reachable reports whether there is a runner with a lease.
	Reachable(ctx context.Context) (bool, error)
	SetImages(ctx context.Context, runner core.RunnerID, images []runnerapi.Image) error
	Images(ctx context.Context, p model.Page) ([]model.Image, error)
}

// imageRequests has the runners that are being asked for their images because of a heartbeat.
type imageRequests struct {
	// mu guards running.
	mu      sync.Mutex
	running map[core.RunnerID]bool
}

func (i *imageRequests) begin(id core.RunnerID) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.running[id] {
		return false
	}
	if i.running == nil {
		i.running = map[core.RunnerID]bool{}
	}
	i.running[id] = true
	return true
}

func (i *imageRequests) end(id core.RunnerID) {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.running, id)
}

// refreshImages asks a runner for its images, after a heartbeat has said that they differ from the recorded ones. Nothing waits for it. If it
// fails, the next heartbeat says so again.
func (f *Fleet) refreshImages(id core.RunnerID, endpoint string) {
	if !f.images.begin(id) {
		return
	}
	started := f.cfg.Go(func(ctx context.Context) {
		defer f.images.end(id)
		ctx, cancel := context.WithTimeout(ctx, imageRefresh)
		defer cancel()
		list, err := f.runners.Images(ctx, endpoint)
		if err == nil {
			err = f.recordImages(ctx, id, list)
		}
		if err != nil {
			f.cfg.Log.InfoContext(ctx, "images of a runner not known yet", "runner_id", id, "err", err)
		}
	})
	if !started {
		f.images.end(id)
	}
}

func (f *Fleet) recordImages(ctx context.Context, id core.RunnerID, list []runnerapi.Image) error {
	return f.store.InSystem(ctx, func(tx Tx) error { return tx.SetImages(ctx, id, list) })
}

// askImages asks runners for their images and updates the rows. If few runners take sandboxes, it asks all of them, because an image may
// have been built a moment ago. If there are many, it asks some of them, and only if anyway is set: heartbeats report when the images of a
// runner have changed. It returns an error only if there are few runners and none of them answers.
func (f *Fleet) askImages(ctx context.Context, anyway bool) error {
	list, err := read(ctx, f, func(tx Tx) ([]model.Runner, error) {
		return tx.EmptiestRunners(ctx, EmptiestFilter{Limit: askedImages + 1, Fresh: true})
	})
	many := len(list) > askedImages
	if err != nil || many && !anyway {
		return err
	}
	// mu guards answered and failed.
	var mu sync.Mutex
	answered, failed := false, error(nil)
	var group errgroup.Group
	for _, r := range list[:min(len(list), askedImages)] {
		group.Go(func() error {
			images, err := f.runners.Images(ctx, r.Endpoint)
			if err == nil && runnerapi.SumImages(images) != r.ImagesSum {
				err = f.recordImages(ctx, r.Info.RunnerID, images)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = err
			} else {
				answered = true
			}
			return nil
		})
	}
	_ = group.Wait() // none of them fails
	if answered || many {
		return nil
	}
	return failed
}

// FindImage resolves a name, a digest or the reference of a pulled image among the images of reachable runners. If several images have the
// name, it returns the newest.
func (f *Fleet) FindImage(ctx context.Context, ref string) (model.Image, error) {
	if err := f.askImages(ctx, false); err != nil {
		return model.Image{}, err
	}
	found := func() (model.Image, error) {
		return read(ctx, f, func(tx Tx) (model.Image, error) {
			if there, err := tx.Reachable(ctx); err != nil || !there {
				if err == nil {
					err = core.Errorf(core.Unavailable, core.CodeNoRunner, "no runner is registered and reachable; start one with `coppice dev` or `coppice runner`")
				}
				return model.Image{}, err
			}
			return findNamed(ctx, tx, ref)
		})
	}
	image, err := found()
	if core.CodeOf(err) != core.CodeImageNotFound {
		return image, err
	}
	if err := f.askImages(ctx, true); err != nil {
		return model.Image{}, err
	}
	return found()
}

// findNamed looks for an image by its name or digest, and then by its reference.
func findNamed(ctx context.Context, tx ImageTx, ref string) (model.Image, error) {
	image, err := tx.FindImage(ctx, ref)
	if core.CodeOf(err) != core.CodeImageNotFound {
		return image, err
	}
	whole, bad := imageref.Whole(ref)
	if bad != nil {
		return image, err
	}
	if found, other := tx.FindImage(ctx, whole); core.CodeOf(other) != core.CodeImageNotFound {
		return found, other
	}
	return image, err
}

// Images lists the images of runners.
func (f *Fleet) Images(ctx context.Context, project core.ProjectID, p model.Page) (list []model.Image, err error) {
	if p.After == "" {
		if err := f.askImages(ctx, false); err != nil {
			f.cfg.Log.InfoContext(ctx, "images as they were last known", "err", err)
		}
	}
	err = f.store.InProject(ctx, project, func(tx Tx) (err error) {
		list, err = tx.Images(ctx, p)
		return err
	})
	return list, err
}
