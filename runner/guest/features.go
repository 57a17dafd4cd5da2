package guest

import (
	"context"
	"slices"
	"sync"

	"github.com/coppice-dev/coppice/core"
)

// features are what the agent said once that it can. The agent at the other end of a connection does not change.
type features struct {
	mu    sync.Mutex // guards the fields below
	asked bool
	list  []string
}

// can returns nil if the agent has all these features, and UNSUPPORTED otherwise. An agent that is older than a feature would
// ignore what it does not know, and do something else than what was asked.
func (c *Client) can(ctx context.Context, need []string) error {
	if len(need) == 0 {
		return nil
	}
	has, err := c.askFeatures(ctx)
	if err != nil {
		return err
	}
	for _, f := range need {
		if !slices.Contains(has, f) {
			return core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "the guest agent of this workspace cannot do this: it is as old as the checkpoint that it came from, and lacks %s; use a workspace of a current image", core.Clip(f))
		}
	}
	return nil
}

// Has reports whether the agent has a feature.
func (c *Client) Has(ctx context.Context, feature string) (bool, error) {
	has, err := c.askFeatures(ctx)
	return slices.Contains(has, feature), err
}

func (c *Client) askFeatures(ctx context.Context) ([]string, error) {
	c.features.mu.Lock()
	has, asked := c.features.list, c.features.asked
	c.features.mu.Unlock()
	if asked {
		return has, nil
	}
	h, err := c.Health(ctx)
	if err != nil {
		return nil, err
	}
	c.features.mu.Lock()
	defer c.features.mu.Unlock()
	c.features.list, c.features.asked = h.Features, true
	return h.Features, nil
}
