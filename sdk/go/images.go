package coppice

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
)

// maxLogPart bounds a part of the log of a build.
const maxLogPart = 2 << 20

// BuildImage builds an image of the project, and returns when it is built. If the build fails, the error has its problem. If ctx ends
// first, the build goes on, and the error is an UnfinishedError.
func (c *Client) BuildImage(ctx context.Context, req BuildImageRequest) (BuildResult, error) {
	var out BuildResult
	err := c.start(ctx, creation("v1", "images").json(req), &out)
	return out, err
}

// StartBuild begins to build an image, and returns the operation. Its log is that of OperationLog. A build whose result is there at once is
// an operation that has ended.
func (c *Client) StartBuild(ctx context.Context, req BuildImageRequest) (Operation, error) {
	r := creation("v1", "images").json(req).with(url.Values{"wait": {"0"}})
	r.key = keyOf(ctx)
	resp, err := c.send(ctx, r)
	if err != nil {
		return Operation{}, err
	}
	if resp.StatusCode == http.StatusAccepted {
		var op Operation
		err := decode(resp, &op)
		return op, err
	}
	var ended BuildResult
	if err := decode(resp, &ended); err != nil {
		return Operation{}, err
	}
	return c.Operation(ctx, ended.OperationID)
}

// OperationLog returns a part of the log of a build from an offset, and the offset of what follows. If the part is empty, there is no
// more yet.
func (c *Client) OperationLog(ctx context.Context, id OperationID, offset int64) (text []byte, next int64, err error) {
	resp, err := c.send(ctx, get("v1", "operations", id, "log").with(url.Values{"offset": {strconv.FormatInt(offset, 10)}}))
	if err != nil {
		return nil, offset, err
	}
	defer resp.Body.Close()
	text, err = io.ReadAll(io.LimitReader(resp.Body, maxLogPart))
	if err != nil {
		return nil, offset, fmt.Errorf("read the log: %w", err)
	}
	return text, offset + int64(len(text)), nil
}

// BuiltImages lists the images that the project has built, by name.
func (c *Client) BuiltImages(ctx context.Context) ([]BuiltImage, error) {
	var out ImageList
	err := c.call(ctx, get("v1", "images").with(url.Values{"limit": {"1"}}), &out)
	return out.Built, err
}

// BuiltImage returns an image that the project has built.
func (c *Client) BuiltImage(ctx context.Context, name string) (BuiltImage, error) {
	var out BuiltImage
	err := c.call(ctx, get("v1", "images", name), &out)
	return out, err
}

// DeleteImage removes the name of an image that the project has built. Its checkpoint stays, and can be deleted then.
func (c *Client) DeleteImage(ctx context.Context, name string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "images", name}}, nil)
}

// PutUpload sends a tar, plain or compressed with gzip, for a build. It replaces an earlier upload with the id. The client never repeats
// this call, because its body has been read.
func (c *Client) PutUpload(ctx context.Context, id string, body io.Reader) (Upload, error) {
	var out Upload
	r := request{method: http.MethodPut, path: []string{"v1", "uploads", id}}
	r.raw, r.once = body, true
	r.header = http.Header{"Content-Type": {"application/x-tar"}, "Expect": {"100-continue"}}
	err := c.call(ctx, r, &out)
	return out, err
}

// Upload returns what is known of an upload.
func (c *Client) Upload(ctx context.Context, id string) (Upload, error) {
	var out Upload
	err := c.call(ctx, get("v1", "uploads", id), &out)
	return out, err
}

// DeleteUpload removes an upload.
func (c *Client) DeleteUpload(ctx context.Context, id string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "uploads", id}}, nil)
}
