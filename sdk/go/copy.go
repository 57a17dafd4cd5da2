package coppice

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// CopyTo copies a local file or tree into a workspace, by the rules of cp -r: into remote when that is a directory, else
// to that name. A local path that ends in "/." means what the directory holds. Owners become root; modes, times and
// symbolic links are kept. It returns how many bytes of file content were sent.
func (c *Client) CopyTo(ctx context.Context, id WorkspaceID, local, remote string) (int64, error) {
	info, err := os.Stat(local)
	if err != nil {
		return 0, err
	}
	base := filepath.Base(filepath.Clean(local))
	if base == "." || base == ".." || base == string(filepath.Separator) {
		local += "/."
	}
	there, err := c.StatFile(ctx, id, remote)
	exists := err == nil
	if err != nil && !errors.Is(err, CodeFileNotFound) {
		return 0, err
	}
	switch {
	case !info.IsDir() && exists && there.Type == FileTypeDir:
		remote = path.Join(remote, base)
	case !info.IsDir() && strings.HasSuffix(remote, "/"):
		return 0, fmt.Errorf("copy to %s: there is no such directory", remote)
	case info.IsDir() && exists && there.Type != FileTypeDir:
		return 0, fmt.Errorf("copy to %s: it is not a directory, and %s is", remote, local)
	case info.IsDir() && exists && !strings.HasSuffix(local, "/."):
		remote = path.Join(remote, base)
	}
	if !info.IsDir() {
		return c.copyFileTo(ctx, id, local, info, remote)
	}
	r, w := io.Pipe()
	var sent int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		var werr error
		sent, werr = writeTar(w, local)
		w.CloseWithError(werr)
	}()
	_, err = c.UploadTar(ctx, id, remote, r)
	_ = r.CloseWithError(errors.New("upload ended"))
	<-done
	return sent, err
}

func (c *Client) copyFileTo(ctx context.Context, id WorkspaceID, local string, info fs.FileInfo, remote string) (int64, error) {
	f, err := os.Open(local)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	_, err = c.WriteFile(ctx, id, remote, f, WriteOptions{Mode: fmt.Sprintf("%04o", info.Mode().Perm())})
	return info.Size(), err
}

// writeTar writes what a directory holds, names relative to it.
func writeTar(w io.Writer, dir string) (int64, error) {
	tw := tar.NewWriter(w)
	var sent int64
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		n, err := writeTarEntry(tw, p, filepath.ToSlash(rel), info)
		sent += n
		return err
	})
	return sent, errors.Join(err, tw.Close())
}

func writeTarEntry(tw *tar.Writer, p, name string, info fs.FileInfo) (int64, error) {
	target := ""
	switch mode := info.Mode(); {
	case mode.IsRegular(), mode.IsDir():
	case mode&fs.ModeSymlink != 0:
		var err error
		if target, err = os.Readlink(p); err != nil {
			return 0, err
		}
	default:
		return 0, fmt.Errorf("copy %s: it is neither a file, a directory nor a symbolic link", p)
	}
	h, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return 0, err
	}
	h.Name, h.Uid, h.Gid, h.Uname, h.Gname = name, 0, 0, "", ""
	if info.IsDir() {
		h.Name += "/"
	}
	if err := tw.WriteHeader(h); err != nil {
		return 0, err
	}
	if !info.Mode().IsRegular() {
		return 0, nil
	}
	f, err := os.Open(p)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	n, err := io.Copy(tw, io.LimitReader(f, h.Size))
	if err == nil && n < h.Size {
		err = fmt.Errorf("copy %s: it shrank while it was read", p)
	}
	return n, err
}

// CopyFrom copies a file or tree out of a workspace, by the same rules. Nothing is written outside of local, whatever
// the archive says; files get the caller's owner. It returns how many bytes of file content were received.
func (c *Client) CopyFrom(ctx context.Context, id WorkspaceID, remote, local string) (int64, error) {
	contents := strings.HasSuffix(remote, "/.")
	clean := path.Clean(remote)
	info, err := c.StatFile(ctx, id, clean)
	if err != nil {
		return 0, err
	}
	there, err := os.Stat(local)
	exists := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	isDir := info.Type == FileTypeDir
	switch {
	case exists && there.IsDir() && (!isDir || !contents && clean != "/"):
		local = filepath.Join(local, path.Base(clean))
	case !isDir && strings.HasSuffix(local, "/"):
		return 0, fmt.Errorf("copy to %s: there is no such directory", local)
	case isDir && exists && !there.IsDir():
		return 0, fmt.Errorf("copy to %s: it is not a directory, and %s is", local, remote)
	}
	if !isDir {
		return c.copyFileFrom(ctx, id, clean, local, info)
	}
	if err := os.MkdirAll(local, 0o755); err != nil { //nolint:gosec // G301: like cp -r; the umask applies
		return 0, err
	}
	body, err := c.DownloadTar(ctx, id, clean)
	if err != nil {
		return 0, err
	}
	defer body.Close()
	return extractTar(body, local, strings.TrimPrefix(path.Base(clean), "/"))
}

func (c *Client) copyFileFrom(ctx context.Context, id WorkspaceID, remote, local string, info FileInfo) (int64, error) {
	body, _, err := c.OpenFile(ctx, id, remote)
	if err != nil {
		return 0, err
	}
	defer body.Close()
	f, err := os.OpenFile(local, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, parseMode(info.Mode))
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(f, body)
	return n, errors.Join(err, f.Close())
}

func parseMode(octal string) fs.FileMode {
	var m uint32
	if _, err := fmt.Sscanf(octal, "%o", &m); err != nil {
		return 0o644
	}
	return fs.FileMode(m) & fs.ModePerm
}

// extractTar unpacks an archive into a directory. The first element of its names, base, is dropped; it is empty where the
// guest's root was asked for.
func extractTar(r io.Reader, dir, base string) (int64, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return 0, err
	}
	defer root.Close()
	var received int64
	modes := map[string]*tar.Header{} // of directories: set last, or a read-only one could not be filled
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return received, err
		}
		name := below(base, h.Name)
		if name == "" {
			continue
		}
		h.Linkname = hardLink(base, h)
		n, err := extractEntry(root, tr, h, name)
		received += n
		if err != nil {
			return received, fmt.Errorf("unpack %s: %w", name, err)
		}
		if h.Typeflag == tar.TypeDir {
			modes[name] = h
		}
	}
	if _, err := io.Copy(io.Discard, r); err != nil { // the padding, and the trailer that says whether it is whole
		return received, err
	}
	for name, h := range modes {
		if err := root.Chmod(name, h.FileInfo().Mode().Perm()); err != nil {
			return received, err
		}
	}
	return received, nil
}

// below gives a name of the archive relative to base; empty for base itself.
func below(base, name string) string {
	name = strings.TrimPrefix(path.Clean("/"+name), "/")
	if base == "" || name == base {
		return strings.TrimPrefix(name, base)
	}
	return strings.TrimPrefix(name, base+"/")
}

func hardLink(base string, h *tar.Header) string {
	if h.Typeflag == tar.TypeLink {
		return below(base, h.Linkname)
	}
	return h.Linkname
}

func extractEntry(root *os.Root, tr *tar.Reader, h *tar.Header, name string) (int64, error) {
	if h.Typeflag == tar.TypeDir {
		return 0, root.MkdirAll(name, 0o700)
	}
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil && path.Dir(name) != "." {
		return 0, err
	}
	if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	switch h.Typeflag {
	case tar.TypeReg:
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, h.FileInfo().Mode().Perm())
		if err != nil {
			return 0, err
		}
		n, err := io.Copy(f, tr)
		if err = errors.Join(err, f.Close()); err != nil {
			return n, err
		}
		return n, root.Chtimes(name, h.ModTime, h.ModTime)
	case tar.TypeSymlink:
		return 0, root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		return 0, root.Link(h.Linkname, name)
	}
	return 0, nil // sockets, devices and pipes mean nothing outside of the guest
}
