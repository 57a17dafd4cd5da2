package controller

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// askedImages bounds the runners that one request asks for their images.
const askedImages = 8

// imageRefresh bounds the time of a request for a runner's images after a heartbeat.
const imageRefresh = 10 * time.Second

// imageAsks has the runners that are being asked for their images because of a heartbeat.
type imageAsks struct {
	// mu guards running.
	mu      sync.Mutex
	running map[core.RunnerID]bool
}

func (i *imageAsks) begin(id core.RunnerID) bool {
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

func (i *imageAsks) end(id core.RunnerID) {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.running, id)
}

// refreshImages asks a runner for its images, after a heartbeat has said that they differ from the recorded ones. Nothing waits for it. If it
// fails, the next heartbeat says so again.
func (c *Controller) refreshImages(id core.RunnerID, endpoint string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing || !c.images.begin(id) {
		return
	}
	c.tasks.Go(func() {
		defer c.images.end(id)
		ctx, cancel := context.WithTimeout(c.runCtx, imageRefresh)
		defer cancel()
		list, err := c.runners.Images(ctx, endpoint)
		if err == nil {
			err = c.recordImages(ctx, id, list)
		}
		if err != nil {
			c.log.InfoContext(ctx, "images of a runner not known yet", "runner_id", id, "err", err)
		}
	})
}

func (c *Controller) recordImages(ctx context.Context, id core.RunnerID, list []runnerapi.Image) error {
	return c.store.InTx(ctx, System(), func(tx Tx) error { return tx.SetImages(ctx, id, list) })
}

// askImages asks runners for their images and updates the rows. If few runners take sandboxes, it asks all of them, because an image may
// have been built a moment ago. If there are many, it asks some of them, and only if anyway is set: heartbeats report when the images of a
// runner have changed. It returns an error only if there are few runners and none of them answers.
func (c *Controller) askImages(ctx context.Context, anyway bool) error {
	list, err := read(ctx, c, System(), func(tx Tx) ([]Runner, error) {
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
			images, err := c.runners.Images(ctx, r.Endpoint)
			if err == nil && runnerapi.SumImages(images) != r.ImagesSum {
				err = c.recordImages(ctx, r.Info.RunnerID, images)
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

// findImage resolves a name or digest among the images of reachable runners. If runners have different images with a name, the newest
// one has it.
func (c *Controller) findImage(ctx context.Context, ref string) (Image, error) {
	if err := c.askImages(ctx, false); err != nil {
		return Image{}, err
	}
	found := func() (Image, error) {
		return read(ctx, c, System(), func(tx Tx) (Image, error) {
			if there, err := tx.Reachable(ctx); err != nil || !there {
				if err == nil {
					err = core.Errorf(core.Unavailable, core.CodeNoRunner, "no runner is registered and reachable; start one with `coppice dev` or `coppice runner`")
				}
				return Image{}, err
			}
			return tx.FindImage(ctx, ref)
		})
	}
	image, err := found()
	if core.CodeOf(err) != core.CodeImageNotFound {
		return image, err
	}
	if err := c.askImages(ctx, true); err != nil {
		return Image{}, err
	}
	return found()
}
