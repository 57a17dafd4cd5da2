package guestclient

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/boundjson"
)

// The guest agent's messages about files. guestagent/guestapi defines them; a test compares the two.
type (
	// File describes a path.
	File struct {
		Path            string            `json:"path"`
		Name            string            `json:"name"`
		Type            string            `json:"type"`
		Size            int64             `json:"size"`
		Mode            string            `json:"mode"`
		UID             int               `json:"uid"`
		GID             int               `json:"gid"`
		MTime           time.Time         `json:"mtime"`
		Target          string            `json:"target,omitempty"`
		Owner           string            `json:"owner,omitempty"`
		Group           string            `json:"group,omitempty"`
		XAttrs          map[string]string `json:"xattrs,omitempty"`
		XAttrsTruncated bool              `json:"xattrs_truncated,omitempty"`
	}

	// MadeDirectory is a directory, and whether it was made.
	MadeDirectory struct {
		File

		Created bool `json:"created"`
	}

	// MakeDirectory asks for a directory.
	MakeDirectory struct {
		Path    string `json:"path"`
		User    string `json:"user,omitempty"`
		Mode    string `json:"mode,omitempty"`
		Parents bool   `json:"parents,omitempty"`
	}

	// RenameFile asks to move a file or directory.
	RenameFile struct {
		From      string `json:"from"`
		To        string `json:"to"`
		User      string `json:"user,omitempty"`
		Mkdirs    bool   `json:"mkdirs,omitempty"`
		NoReplace bool   `json:"no_replace,omitempty"`
	}

	// SetFileAttributes asks to change extended attributes.
	SetFileAttributes struct {
		Path   string            `json:"path"`
		User   string            `json:"user,omitempty"`
		Set    map[string]string `json:"set,omitempty"`
		Remove []string          `json:"remove,omitempty"`
	}
)

// boundFile bounds the description of one file.
var boundFile = boundjson.Bound{
	Name: "the guest's file", Bytes: 1 << 20, Elements: 512, List: 256, Depth: 4, String: 8 << 10, Text: 320 << 10,
}

// The routes of the agent that change files.
const (
	pathFiles   = "/v1/files"
	pathFilesAs = "/v1/files/content" // of requests that agents without users must refuse
	pathMakeDir = "/v1/files/mkdir"
	pathRename  = "/v1/files/rename"
	pathXAttrs  = "/v1/files/xattrs"
)

// PutFile is a file to write. Missing directories are made.
type PutFile struct {
	Path    string `json:"path"`
	Content []byte `json:"content,omitempty"`
	Mode    string `json:"mode,omitempty"` // octal; empty: 0644
	User    string `json:"user,omitempty"` // writes it, with its rights; empty: root
}

// PutFile writes a file. The agent writes it beside the target and renames it, so a repeat does no harm.
func (c *Client) PutFile(ctx context.Context, s model.Sandbox, f PutFile) error {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	path, q := pathFiles, url.Values{"path": {f.Path}, "mkdirs": {"1"}}
	if f.Mode != "" {
		q.Set("mode", f.Mode)
	}
	if f.User != "" {
		path = pathFilesAs
		q.Set("user", f.User)
	}
	res, err := c.ask(ctx, s, http.MethodPut, path, q, contentRaw, bytes.NewReader(f.Content))
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// MakeDirectory makes a directory.
func (c *Client) MakeDirectory(ctx context.Context, s model.Sandbox, req MakeDirectory) (MadeDirectory, error) {
	var out MadeDirectory
	err := c.call(ctx, s, http.MethodPost, pathMakeDir, nil, req, answer{boundFile, &out})
	return out, err
}

// RenameFile moves a file or directory.
func (c *Client) RenameFile(ctx context.Context, s model.Sandbox, req RenameFile) (File, error) {
	var out File
	err := c.call(ctx, s, http.MethodPost, pathRename, nil, req, answer{boundFile, &out})
	return out, err
}

// SetFileAttributes changes extended attributes of a file or directory.
func (c *Client) SetFileAttributes(ctx context.Context, s model.Sandbox, req SetFileAttributes) (File, error) {
	var out File
	err := c.call(ctx, s, http.MethodPost, pathXAttrs, nil, req, answer{boundFile, &out})
	return out, err
}

// Stat describes a path. Symbolic links are followed. It fails with FILE_NOT_FOUND if nothing is there.
func (c *Client) Stat(ctx context.Context, s model.Sandbox, path string) (File, error) {
	var out File
	err := c.call(ctx, s, http.MethodGet, pathFiles, url.Values{"path": {path}, "stat": {"1"}, "follow": {"1"}}, nil, answer{boundFile, &out})
	return out, err
}

// ReadFile reads a file of at most most bytes.
func (c *Client) ReadFile(ctx context.Context, s model.Sandbox, path string, most int64) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	res, err := c.ask(ctx, s, http.MethodGet, pathFiles, url.Values{"path": {path}}, "", nil)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(res.Body, most+1))
	switch err = errors.Join(err, res.Body.Close()); {
	case err != nil:
		return nil, fault(ctx, err)
	case int64(len(b)) > most:
		return nil, core.Errorf(core.FailedPrecondition, core.CodeGuestProtocol, "%s has more than %d bytes", core.Clip(path), most)
	}
	return b, nil
}

// PutTar unpacks a tar into a directory, which is made if it is missing.
func (c *Client) PutTar(ctx context.Context, s model.Sandbox, dir string, body io.Reader, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	res, err := c.ask(ctx, s, http.MethodPut, pathFiles, url.Values{"path": {dir}, "mkdirs": {"1"}, "untar": {"1"}}, contentTar, body)
	if err != nil {
		return err
	}
	return res.Body.Close()
}
