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

// CopyTo copies a local file or tree into a workspace, by the rules of cp -r: into remote if that is a directory,
// otherwise to that name. A local path that ends in "/." means the content of the directory. Owners become root; modes,
// times and symbolic links are kept. It returns how many bytes of file content were sent.
func (c *Client) CopyTo(ctx context.Context, id WorkspaceID, local, remote string) (int64, error) {
	return c.CopyToWith(ctx, id, local, remote, CopyOptions{})
}

// CopyToWith is CopyTo that tells its progress; of the options it heeds no other.
func (c *Client) CopyToWith(ctx context.Context, id WorkspaceID, local, remote string, o CopyOptions) (int64, error) {
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
		return c.copyFileTo(ctx, id, local, info, remote, o)
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
	_, err = c.UploadTar(ctx, id, remote, o.read(r))
	_ = r.CloseWithError(errors.New("upload ended"))
	<-done
	return sent, err
}

func (c *Client) copyFileTo(ctx context.Context, id WorkspaceID, local string, info fs.FileInfo, remote string, o CopyOptions) (int64, error) {
	f, err := os.Open(local)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	_, err = c.WriteFile(ctx, id, remote, o.read(f), WriteOptions{Mode: fmt.Sprintf("%04o", info.Mode().Perm())})
	return info.Size(), err
}

// writeTar writes the content of a directory, with names relative to it.
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
