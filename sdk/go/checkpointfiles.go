package coppice

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
)

func checkpointFile(id CheckpointID, path, flag string) request {
	q := url.Values{"path": {path}}
	if flag != "" {
		q.Set(flag, "true")
	}
	return get("v1", "checkpoints", id, "files").with(q)
}

// OpenCheckpointFile reads a file of a checkpoint, without a machine. Symbolic links are followed. The caller closes the body.
func (c *Client) OpenCheckpointFile(ctx context.Context, id CheckpointID, path string) (io.ReadCloser, FileInfo, error) {
	var info FileInfo
	resp, err := c.send(ctx, checkpointFile(id, path, ""))
	if err != nil {
		return nil, info, err
	}
	if err := json.Unmarshal([]byte(resp.Header.Get("Coppice-File")), &info); err != nil {
		return nil, info, errors.Join(fmt.Errorf("read %s: decode what it is: %w", path, err), resp.Body.Close())
	}
	return resp.Body, info, nil
}

// ListCheckpointFiles lists a directory of a checkpoint.
func (c *Client) ListCheckpointFiles(ctx context.Context, id CheckpointID, path string) (FileList, error) {
	var out FileList
	err := c.call(ctx, checkpointFile(id, path, "list"), &out)
	return out, err
}

// StatCheckpointFile describes a path of a checkpoint. A symbolic link at its end is not followed.
func (c *Client) StatCheckpointFile(ctx context.Context, id CheckpointID, path string) (FileInfo, error) {
	var out FileInfo
	err := c.call(ctx, checkpointFile(id, path, "stat"), &out)
	return out, err
}
