package coppice

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
)

// What is in this file needs a guest agent that knows it. Agents in old checkpoints answer with the code UNSUPPORTED.

// StatOptions says how Stat describes a path.
type StatOptions struct {
	User   string // who looks, with that user's rights; the path may begin with ~ then
	Follow bool   // describe what a symbolic link leads to
	XAttrs bool   // with extended attributes
}

// Stat describes a path.
func (c *Client) Stat(ctx context.Context, id WorkspaceID, path string, opts StatOptions) (FileInfo, error) {
	req := filesRequest(http.MethodGet, id, path, "stat")
	set(req.query, "user", opts.User)
	if opts.Follow {
		req.query.Set("follow", "true")
	}
	if opts.XAttrs {
		req.query.Set("xattrs", "true")
	}
	var out FileInfo
	err := c.call(ctx, req, &out)
	return out, err
}

// ListOptions says what ListTree lists.
type ListOptions struct {
	User   string // who looks, with that user's rights; the path may begin with ~ then
	Depth  int    // levels of directories; 0 is 1, the directory itself
	XAttrs bool   // with extended attributes
}

// ListTree lists a directory and those below it. Symbolic links are not followed.
func (c *Client) ListTree(ctx context.Context, id WorkspaceID, path string, opts ListOptions) (FileList, error) {
	req := filesRequest(http.MethodGet, id, path, "list")
	set(req.query, "user", opts.User)
	if opts.Depth > 0 {
		req.query.Set("depth", strconv.Itoa(opts.Depth))
	}
	if opts.XAttrs {
		req.query.Set("xattrs", "true")
	}
	var out FileList
	err := c.call(ctx, req, &out)
	return out, err
}

// OpenFileAs reads a file with the rights of a user. The caller closes the body.
func (c *Client) OpenFileAs(ctx context.Context, id WorkspaceID, path, user string) (io.ReadCloser, FileInfo, error) {
	return c.openFile(ctx, id, path, user, 0)
}

// openFile is OpenFileAs with a bound; 0 means the default.
func (c *Client) openFile(ctx context.Context, id WorkspaceID, path, user string, most int64) (io.ReadCloser, FileInfo, error) {
	req := bounded(filesRequest(http.MethodGet, id, path), most)
	set(req.query, "user", user)
	resp, err := c.sendFiles(ctx, id, req)
	if err != nil {
		return nil, FileInfo{}, err
	}
	var info FileInfo
	if err := json.Unmarshal([]byte(resp.Header.Get("Coppice-File")), &info); err != nil {
		return nil, info, errors.Join(fmt.Errorf("read %s: decode what it is: %w", path, err), resp.Body.Close())
	}
	return resp.Body, info, nil
}

// RemoveFileAs is RemoveFile with the rights of a user.
func (c *Client) RemoveFileAs(ctx context.Context, id WorkspaceID, path, user string, recursive bool) error {
	req := filesRequest(http.MethodDelete, id, path)
	set(req.query, "user", user)
	if recursive {
		req.query.Set("recursive", "true")
	}
	return c.call(ctx, req, nil)
}

// MakeDirectory makes a directory.
func (c *Client) MakeDirectory(ctx context.Context, id WorkspaceID, req MakeDirectoryRequest) (MadeDirectory, error) {
	var out MadeDirectory
	err := c.call(ctx, post("v1", "workspaces", id, "files", "mkdir").json(req), &out)
	return out, err
}

// RenameFile moves a file or directory.
func (c *Client) RenameFile(ctx context.Context, id WorkspaceID, req RenameFileRequest) (FileInfo, error) {
	var out FileInfo
	err := c.call(ctx, post("v1", "workspaces", id, "files", "rename").json(req), &out)
	return out, err
}

// SetFileAttributes sets and removes extended attributes of users, and returns all that the file has.
func (c *Client) SetFileAttributes(ctx context.Context, id WorkspaceID, req SetFileAttributesRequest) (FileInfo, error) {
	var out FileInfo
	err := c.call(ctx, post("v1", "workspaces", id, "files", "xattrs").json(req), &out)
	return out, err
}
