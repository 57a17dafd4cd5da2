package coppice

import (
	"context"
	"net/url"
	"strconv"
)

// CollectStore deletes objects from the store that nothing needs any more, or, with dryRun, only reports them. It needs
// the scope admin.
func (c *Client) CollectStore(ctx context.Context, dryRun bool) (StoreGarbage, error) {
	var out StoreGarbage
	err := c.call(ctx, post("v1", "store", "gc").with(url.Values{"dry_run": {strconv.FormatBool(dryRun)}}), &out)
	return out, err
}

// CheckStore compares the store with the database. It needs the scope admin.
func (c *Client) CheckStore(ctx context.Context) (StoreReport, error) {
	var out StoreReport
	err := c.call(ctx, get("v1", "store", "check"), &out)
	return out, err
}

// StorePart is a part of the stored data: number Which of Of parts, counted from 1. All parts of one Of together have
// every frame once.
type StorePart struct{ Which, Of int }

// CheckStoreData reads and verifies a part of the stored data for a few seconds. after is Next of the previous answer;
// empty to begin. It needs the scope admin.
func (c *Client) CheckStoreData(ctx context.Context, part StorePart, after string) (StoreData, error) {
	var out StoreData
	q := url.Values{"part": {strconv.Itoa(part.Which)}, "of": {strconv.Itoa(part.Of)}}
	if after != "" {
		q.Set("after", after)
	}
	err := c.call(ctx, get("v1", "store", "check", "data").with(q), &out)
	return out, err
}
