package coppice

import (
	"context"
	"net/http"
	"net/url"
)

// CreateRunnerToken makes a token for one runner to join. It needs an administrator's key.
func (c *Client) CreateRunnerToken(ctx context.Context, req CreateRunnerTokenRequest) (RunnerToken, error) {
	var out RunnerToken
	err := c.call(ctx, post("v1", "runner-tokens").json(req), &out)
	return out, err
}

// DrainRunner stops new sandboxes on a runner, or, with on false, allows them again. Its running sandboxes go on. It
// needs an administrator's key.
func (c *Client) DrainRunner(ctx context.Context, id RunnerID, on bool) (Runner, error) {
	var out Runner
	err := c.call(ctx, request{method: http.MethodPatch, path: []string{"v1", "runners", id}, body: PatchRunnerRequest{Draining: on}}, &out)
	return out, err
}

// DeleteRunner removes a runner permanently. Without force, a runner with living workspaces is refused; with force,
// those workspaces are lost.
func (c *Client) DeleteRunner(ctx context.Context, id RunnerID, force bool) error {
	req := request{method: http.MethodDelete, path: []string{"v1", "runners", id}}
	if force {
		req.query = url.Values{"force": {"true"}}
	}
	return c.call(ctx, req, nil)
}
