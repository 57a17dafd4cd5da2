package coppice

import (
	"context"
	"net/url"
	"strconv"
)

// CollectStore removes from the store what nothing needs any more, or with dryRun says what it would. It takes the scope admin.
func (c *Client) CollectStore(ctx context.Context, dryRun bool) (StoreGarbage, error) {
	var out StoreGarbage
	err := c.call(ctx, post("v1", "store", "gc").with(url.Values{"dry_run": {strconv.FormatBool(dryRun)}}), &out)
	return out, err
}

// CheckStore compares the store with what the database knows of it. It takes the scope admin.
func (c *Client) CheckStore(ctx context.Context) (StoreReport, error) {
	var out StoreReport
	err := c.call(ctx, get("v1", "store", "check"), &out)
	return out, err
}
