package coppice

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strconv"
)

// CreateWatch watches a directory of a workspace for changes.
func (c *Client) CreateWatch(ctx context.Context, id WorkspaceID, req CreateWatchRequest) (Watch, error) {
	var out Watch
	err := c.call(ctx, post("v1", "workspaces", id, "watches").json(req), &out)
	return out, err
}

// Watches lists the watches of a workspace, oldest first.
func (c *Client) Watches(ctx context.Context, id WorkspaceID) ([]Watch, error) {
	var out WatchList
	err := c.call(ctx, get("v1", "workspaces", id, "watches"), &out)
	return out.Items, err
}

// DeleteWatch ends a watch.
func (c *Client) DeleteWatch(ctx context.Context, id WorkspaceID, watch WatchID) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "workspaces", id, "watches", watch}}, nil)
}

// maxWatchLine bounds an event, which comes from a guest.
const maxWatchLine = 64 << 10

// WatchEvents iterates over the events of a watch whose numbers are greater than after, until the watch or ctx ends. When
// a connection breaks, for example because the workspace is checkpointed, it goes on with the next one.
func (c *Client) WatchEvents(ctx context.Context, id WorkspaceID, watch WatchID, after int64) iter.Seq2[WatchEvent, error] {
	return func(yield func(WatchEvent, error) bool) {
		var gone away
		for {
			last, more, err := c.watchEvents(ctx, id, watch, after, yield)
			if last > after {
				gone.back()
			}
			after = last
			if !more {
				return
			}
			if err == nil {
				if err = c.watchGoesOn(ctx, id, watch); err == nil {
					continue
				}
				if errors.Is(err, errWatchEnded) {
					return
				}
			}
			if ctx.Err() != nil {
				yield(WatchEvent{}, context.Cause(ctx))
				return
			}
			if err := gone.endure(ctx, err); err != nil {
				yield(WatchEvent{}, err)
				return
			}
		}
	}
}

// watchEvents reads one answer. It returns the number of the last event, and whether the caller wants more.
func (c *Client) watchEvents(ctx context.Context, id WorkspaceID, watch WatchID, after int64, yield func(WatchEvent, error) bool) (int64, bool, error) {
	q := url.Values{"after": {strconv.FormatInt(after, 10)}, "follow": {"true"}}
	resp, err := c.send(ctx, get("v1", "workspaces", id, "watches", watch, "events").with(q))
	if err != nil {
		return after, true, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxWatchLine)
	for lines.Scan() {
		var e WatchEvent
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			yield(e, fmt.Errorf("read the events of watch %s: %w", watch, err))
			return after, false, nil
		}
		after = e.Seq
		if !yield(e, nil) {
			return after, false, nil
		}
	}
	return after, true, lines.Err()
}

var errWatchEnded = errors.New("the watch has ended")

// watchGoesOn returns errWatchEnded when a watch has ended or is gone. A stream may also end because a server stops.
func (c *Client) watchGoesOn(ctx context.Context, id WorkspaceID, watch WatchID) error {
	list, err := c.Watches(ctx, id)
	if err != nil {
		return err
	}
	for _, w := range list {
		if w.ID == watch && !w.Ended {
			return nil
		}
	}
	return errWatchEnded
}
