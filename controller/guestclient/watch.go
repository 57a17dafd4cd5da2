package guestclient

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/boundjson"
)

// The guest agent's messages about watches. guestagent/guestapi defines them; a test compares the two.
type (
	// Watch is a watch on a directory.
	Watch struct {
		ID         core.WatchID `json:"id"`
		Path       string       `json:"path"`
		Recursive  bool         `json:"recursive"`
		User       string       `json:"user,omitempty"`
		CreatedAt  time.Time    `json:"created_at"`
		Last       int64        `json:"last"`
		Incomplete bool         `json:"incomplete"`
		Ended      bool         `json:"ended"`
	}

	// CreateWatch asks for a watch.
	CreateWatch struct {
		Path      string `json:"path"`
		User      string `json:"user,omitempty"`
		Recursive bool   `json:"recursive,omitempty"`
	}

	watchList struct {
		Watches []Watch `json:"watches"`
	}
)

var boundWatches = boundjson.Bound{
	Name: "the guest's list of watches", Bytes: 1 << 20, Elements: 2 << 10, List: 64, Depth: 4, String: 8 << 10, Text: 512 << 10,
}

// PathWatches is the agent's route of watches.
const PathWatches = "/v1/watches"

// CreateWatch watches a directory.
func (c *Client) CreateWatch(ctx context.Context, s model.Sandbox, req CreateWatch) (Watch, error) {
	var out Watch
	err := c.call(ctx, s, http.MethodPost, PathWatches, nil, req, answer{boundWatches, &out})
	if _, bad := core.ParseID[core.WatchID](string(out.ID)); err == nil && bad != nil {
		return out, core.Errorf(core.Unavailable, core.CodeGuestProtocol, "the guest's agent gave a watch without an id")
	}
	return out, err
}

// Watches lists the watches of a guest.
func (c *Client) Watches(ctx context.Context, s model.Sandbox) ([]Watch, error) {
	var out watchList
	err := c.call(ctx, s, http.MethodGet, PathWatches, nil, nil, answer{boundWatches, &out})
	return out.Watches, err
}

// DeleteWatch ends a watch.
func (c *Client) DeleteWatch(ctx context.Context, s model.Sandbox, watch core.WatchID) error {
	return c.call(ctx, s, http.MethodDelete, PathWatches+"/"+url.PathEscape(string(watch)), nil, nil, answer{})
}
