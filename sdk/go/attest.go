package coppice

import (
	"context"
	"encoding/json"
	"net/url"
	"strconv"
)

// Attestation returns the signed report of a workspace's reseal in an epoch; 0 is the present one. The bytes are the
// signed envelope: `coppice attest verify` accepts exactly these bytes, one envelope per line.
func (c *Client) Attestation(ctx context.Context, id WorkspaceID, epoch int64) ([]byte, error) {
	q := url.Values{}
	if epoch != 0 {
		q.Set("epoch", strconv.FormatInt(epoch, 10))
	}
	var out json.RawMessage
	err := c.call(ctx, get("v1", "workspaces", id, "attestation").with(q), &out)
	return out, err
}

// Authority returns the certificate with which attestations are verified. Get it once, over a channel that you trust.
func (c *Client) Authority(ctx context.Context) (Authority, error) {
	var out Authority
	err := c.call(ctx, get("v1", "authority"), &out)
	return out, err
}
