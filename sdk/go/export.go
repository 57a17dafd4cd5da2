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

// ExportCheckpoint returns a checkpoint as one file, and the file's size in bytes. If the file is not complete, its
// Read returns an error instead of io.EOF. The caller must close it. If there is a store and the checkpoint is not
// sealed, the error is CodeCheckpointNotReady: call WaitSealed first. Without a store, the checkpoint's host packs the
// file before the call returns.
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
	sum  hash.Hash // of everything before tail
	tail []byte    // the last bytes received; at the end, this is the hash
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

// ImportOptions configure an import. The zero value works.
type ImportOptions struct {
	Name string // of the new checkpoint
	Size int64  // of the file in bytes; 0: unknown
}

// ImportCheckpoint makes a checkpoint from a file of ExportCheckpoint, of this or another installation. It is sealed
// and has no parent. If the file is not complete, the error is CodeImportInvalid and nothing is imported. The client
// never repeats this call, because its body has been read; with WithIdempotencyKey the caller may repeat it.
func (c *Client) ImportCheckpoint(ctx context.Context, file io.Reader, opts ImportOptions) (Checkpoint, error) {
	var out Checkpoint
	req := creation("v1", "checkpoints").with(url.Values{})
	set(req.query, "name", opts.Name)
	req.raw, req.once, req.size = file, true, opts.Size
	req.header = http.Header{"Content-Type": {"application/octet-stream"}, "Expect": {"100-continue"}}
	err := c.call(ctx, req, &out)
	return out, err
}
