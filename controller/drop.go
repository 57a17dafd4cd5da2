package controller

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
)

const (
	dropTimeout     = 10 * time.Second
	dropConcurrency = 8
)

// drop tells a runner at once to take sandboxes down whose rows have ended. It is a courtesy: should the runner not hear it,
// its next heartbeat is told.
func (c *Controller) drop(ctx context.Context, endpoint string, ids ...core.SandboxID) {
	if len(ids) == 0 || endpoint == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, dropTimeout) // a controller that stops does not wait for it
	defer cancel()
	var group errgroup.Group
	group.SetLimit(dropConcurrency)
	for _, id := range ids {
		group.Go(func() error {
			if err := c.runners.DeleteSandbox(ctx, endpoint, id); err != nil && core.CategoryOf(err) != core.NotFound {
				c.log.InfoContext(ctx, "sandbox left to the next heartbeat", "sandbox_id", id, "err", err)
			}
			return nil
		})
	}
	_ = group.Wait() // none of them fails
}

// dropAll is drop, of several runners.
func (c *Controller) dropAll(ctx context.Context, list []Sandbox) {
	byEndpoint := map[string][]core.SandboxID{}
	for _, s := range list {
		byEndpoint[s.Endpoint] = append(byEndpoint[s.Endpoint], s.ID)
	}
	for endpoint, ids := range byEndpoint {
		c.drop(ctx, endpoint, ids...)
	}
}
