package coppice

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
)

// WriteOptions says how a file is written. The zero value keeps the attributes of an existing file, or makes a file of
// mode 0644.
type WriteOptions struct {
	Mode   string // octal permission bits, such as "0755"
	UID    *int
	GID    *int
	Mkdirs bool // make missing parent directories

	User    string // who writes, with that user's rights; the path may begin with ~ then
	InPlace bool   // write into the file itself, which is emptied before
	Offset  *int64 // with InPlace: write from this byte on, and keep the others
	Append  bool   // with InPlace: write behind the last byte
}

func filesRequest(method string, id WorkspaceID, path string, flags ...string) request {
	q := url.Values{"path": {path}}
	for _, f := range flags {
		q.Set(f, "true")
	}
	return request{method: method, path: []string{"v1", "workspaces", id, "files"}, query: q}
}

// OpenFile reads a file of at most DefaultCopyBytes. The caller closes the body.
func (c *Client) OpenFile(ctx context.Context, id WorkspaceID, path string) (io.ReadCloser, FileInfo, error) {
	return c.openFile(ctx, id, path, "", 0)
}

// ReadFile returns the bytes of a file, at most limit of them; a longer file is an error.
func (c *Client) ReadFile(ctx context.Context, id WorkspaceID, path string, limit int64) ([]byte, error) {
	body, info, err := c.OpenFile(ctx, id, path)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	if info.Size > limit {
		return nil, fmt.Errorf("read %s: it has %d bytes, more than %d", path, info.Size, limit)
	}
	b, err := io.ReadAll(io.LimitReader(body, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("read %s: it has more than %d bytes", path, limit)
	}
	return b, err
}

// WriteFile streams r into a file. Unless it is written in place, readers see either the old file or the complete new
// one.
func (c *Client) WriteFile(ctx context.Context, id WorkspaceID, path string, r io.Reader, opts WriteOptions) (FileInfo, error) {
	req := filesRequest(http.MethodPut, id, path)
	set(req.query, "mode", opts.Mode)
	if opts.UID != nil {
		req.query.Set("uid", strconv.Itoa(*opts.UID))
	}
	if opts.GID != nil {
		req.query.Set("gid", strconv.Itoa(*opts.GID))
	}
	if opts.Mkdirs {
		req.query.Set("mkdirs", "true")
	}
	set(req.query, "user", opts.User)
	if opts.InPlace {
		req.query.Set("in_place", "true")
	}
	if opts.Offset != nil {
		req.query.Set("offset", strconv.FormatInt(*opts.Offset, 10))
	}
	if opts.Append {
		req.query.Set("append", "true")
	}
	return c.put(ctx, id, req, r, "application/octet-stream")
}

// UploadTar unpacks a tar stream below a directory.
func (c *Client) UploadTar(ctx context.Context, id WorkspaceID, dir string, r io.Reader) (FileInfo, error) {
	return c.put(ctx, id, filesRequest(http.MethodPut, id, dir, "untar"), r, "application/x-tar")
}

func (c *Client) put(ctx context.Context, id WorkspaceID, req request, r io.Reader, kind string) (FileInfo, error) {
	if r == nil {
		r = http.NoBody
	}
	req.raw, req.header = r, http.Header{"Content-Type": {kind}}
	var out FileInfo
	resp, err := c.sendFiles(ctx, id, req)
	if err != nil {
		return out, err
	}
	return out, decode(resp, &out)
}

// bounded sets the bound on what a request reads; 0 means the default.
func bounded(r request, most int64) request {
	if most > 0 {
		r.query.Set("max_bytes", strconv.FormatInt(most, 10))
	}
	return r
}

// DownloadTar reads a file or tree as a tar of at most DefaultCopyBytes. Its names begin with the last element of path. The content of
// pseudo file systems such as /proc is not in it, nor are devices, sockets and pipes. If the guest could not read everything, its Read
// returns an error instead of io.EOF.
func (c *Client) DownloadTar(ctx context.Context, id WorkspaceID, path string) (io.ReadCloser, error) {
	t, err := c.downloadTar(ctx, id, path, 0)
	if err != nil {
		return nil, err
	}
	return t, nil
}

func (c *Client) downloadTar(ctx context.Context, id WorkspaceID, path string, most int64) (*tarBody, error) {
	resp, err := c.sendFiles(ctx, id, bounded(filesRequest(http.MethodGet, id, path, "tar"), most)) //nolint:bodyclose // the caller closes it
	if err != nil {
		return nil, err
	}
	return &tarBody{resp: resp, path: path}, nil
}

// tarBody checks the trailers at the end of the archive.
type tarBody struct {
	resp    *http.Response
	path    string
	leftOut leftOut // once all was read
}

// leftOut is what the guest says it has left out of an archive.
type leftOut struct {
	Pseudo  []string `json:"pseudo"`
	More    int      `json:"more"`
	Special int      `json:"special"`
}

func (t *tarBody) Read(p []byte) (int, error) {
	n, err := t.resp.Body.Read(p)
	if errors.Is(err, io.EOF) {
		if status := t.resp.Trailer.Get("Coppice-Status"); status != "" && status != "ok" {
			return n, fmt.Errorf("read %s: %s", t.path, status)
		}
		if left := t.resp.Trailer.Get("Coppice-Left-Out"); left != "" {
			if json.Unmarshal([]byte(left), &t.leftOut) != nil {
				return n, fmt.Errorf("read %s: the workspace does not say properly what it left out", t.path)
			}
		}
	}
	return n, err
}

func (t *tarBody) Close() error { return t.resp.Body.Close() }

// StatFile describes a path. Symbolic links are not followed; Stat can.
func (c *Client) StatFile(ctx context.Context, id WorkspaceID, path string) (FileInfo, error) {
	var out FileInfo
	err := c.call(ctx, filesRequest(http.MethodGet, id, path, "stat"), &out)
	return out, err
}

// ListFiles lists a directory; ListTree those below it too.
func (c *Client) ListFiles(ctx context.Context, id WorkspaceID, path string) (FileList, error) {
	var out FileList
	err := c.call(ctx, filesRequest(http.MethodGet, id, path, "list"), &out)
	return out, err
}

// RemoveFile removes a file, or, with recursive, a directory and everything in it.
func (c *Client) RemoveFile(ctx context.Context, id WorkspaceID, path string, recursive bool) error {
	req := filesRequest(http.MethodDelete, id, path)
	if recursive {
		req.query.Set("recursive", "true")
	}
	return c.call(ctx, req, nil)
}
