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

// StorePart is a part of what is stored: the Which-th of Of, from 1. The parts of one Of have every frame once.
type StorePart struct{ Which, Of int }

// CheckStoreData reads a part of what is stored and verifies it, for a few seconds. after is Next of the answer before; empty to begin. It takes the
// scope admin.
func (c *Client) CheckStoreData(ctx context.Context, part StorePart, after string) (StoreData, error) {
	var out StoreData
	q := url.Values{"part": {strconv.Itoa(part.Which)}, "of": {strconv.Itoa(part.Of)}}
	if after != "" {
		q.Set("after", after)
	}
	err := c.call(ctx, get("v1", "store", "check", "data").with(q), &out)
	return out, err
}
