package coppice

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"net/url"
)

// ExportCheckpoint returns a sealed checkpoint as one file, and its size in bytes. Its Read returns an error instead of io.EOF when the file did not
// come whole. The caller closes it. A checkpoint that is not sealed is CodeCheckpointNotReady: WaitSealed first.
func (c *Client) ExportCheckpoint(ctx context.Context, id CheckpointID) (io.ReadCloser, int64, error) {
	resp, err := c.send(ctx, get("v1", "checkpoints", id, "export")) //nolint:bodyclose // the caller closes it
	if err != nil {
		return nil, 0, err
	}
	return &exportBody{body: resp.Body, sum: sha256.New()}, resp.ContentLength, nil
}

// exportBody compares the file with the hash at its end.
type exportBody struct {
	body io.ReadCloser
	sum  hash.Hash // of all but tail
	tail []byte    // the last bytes that have come: at the end, the hash
}

func (e *exportBody) Read(p []byte) (int, error) {
	n, err := e.body.Read(p)
	e.tail = append(e.tail, p[:n]...)
	if more := len(e.tail) - sha256.Size; more > 0 {
		e.sum.Write(e.tail[:more])
		e.tail = append(e.tail[:0], e.tail[more:]...)
	}
	if errors.Is(err, io.EOF) && !bytes.Equal(e.tail, e.sum.Sum(nil)) {
		return n, fmt.Errorf("the exported file was changed on its way: %w", io.ErrUnexpectedEOF)
	}
	return n, err
}

func (e *exportBody) Close() error { return e.body.Close() }

// ImportOptions say what becomes of a file. The zero value works.
type ImportOptions struct {
	Name string // of the new checkpoint
	Size int64  // of the file in bytes, where it is known
}

// ImportCheckpoint makes a checkpoint out of a file that ExportCheckpoint gave, here or elsewhere. It is sealed and has no parent. A file that is
// not whole is CodeImportInvalid, and nothing is imported. The call is never repeated, for its body is gone; under WithIdempotencyKey the caller may.
func (c *Client) ImportCheckpoint(ctx context.Context, file io.Reader, opts ImportOptions) (Checkpoint, error) {
	var out Checkpoint
	req := creation("v1", "checkpoints").with(url.Values{})
	set(req.query, "name", opts.Name)
	req.raw, req.once, req.size = file, true, opts.Size
	req.header = http.Header{"Content-Type": {"application/octet-stream"}, "Expect": {"100-continue"}}
	err := c.call(ctx, req, &out)
	return out, err
}
