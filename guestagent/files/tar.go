//go:build linux

package files

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/archive"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// getTar sends a file or a directory as a tar whose names start at the last element of the path ("." for the root). The
// tar has at most the given number of bytes.
func getTar(w http.ResponseWriter, r *http.Request, c caller, name string, most int64) error {
	started := false
	var left guestapi.LeftOut
	err := c.do(func() error {
		if err := archive.Check(name); err != nil {
			return answer.FileError(err, "read", name)
		}
		w.Header().Set("Content-Type", "application/x-tar")
		w.Header().Set("Trailer", guestapi.HeaderStatus+", "+guestapi.HeaderLeftOut)
		w.WriteHeader(http.StatusOK)
		started = true
		var err error
		left, err = archive.Write(r.Context(), w, name, most)
		return err
	})
	if !started {
		return err
	}
	status := "ok"
	if err != nil {
		status = core.Clip(core.MessageOf(answer.FileError(err, "read", name)))
	}
	w.Header().Set(guestapi.HeaderStatus, status)
	if b, err := json.Marshal(left); err == nil && (len(left.Pseudo) > 0 || left.Special > 0) {
		w.Header().Set(guestapi.HeaderLeftOut, string(b))
	}
	return nil
}

// putTar unpacks a tar into a directory, and creates the directory if necessary.
func putTar(w http.ResponseWriter, r *http.Request, c caller, name string, at attributes) error {
	var info guestapi.FileInfo
	err := c.do(func() error {
		if at.mkdirs {
			if err := os.MkdirAll(name, 0o755); err != nil {
				return err
			}
		} else if err := os.Mkdir(name, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		root, err := os.OpenRoot(name)
		if err != nil {
			return err
		}
		defer func() { _ = root.Close() }()
		if err := readTar(r.Context(), root, r.Body, at); err != nil {
			return err
		}
		fi, err := os.Lstat(name)
		if err == nil {
			info = infoOf(name, fi)
		}
		return err
	})
	if err != nil {
		return answer.FileError(err, "unpack into", name)
	}
	answer.WriteJSON(w, http.StatusOK, info)
	return nil
}

// readTar unpacks only into root: os.Root resolves each name, including symlinks that an earlier entry made.
func readTar(ctx context.Context, root *os.Root, body io.Reader, at attributes) error {
	tr := tar.NewReader(body)
	var dirs []*tar.Header // their modes and times are set last, when nothing more is written into them
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return tarError(ctx, err)
		}
		h.Name = strings.TrimSuffix(path.Clean(strings.TrimLeft(h.Name, "/")), "/")
		if h.Name == "." {
			continue
		}
		if !filepath.IsLocal(h.Name) {
			return core.Errorf(core.Invalid, core.CodeMalformedBody, "the tar has the name %q, which leads out of the directory", core.Clip(h.Name))
		}
		if at.user || at.uid >= 0 {
			h.Uid = at.uid // as a user, what the user makes is the user's
		}
		if at.user || at.gid >= 0 {
			h.Gid = at.gid
		}
		if err := unpack(ctx, root, tr, h); err != nil {
			return err
		}
		if h.Typeflag == tar.TypeDir {
			dirs = append(dirs, h)
		}
	}
	for _, dir := range slices.Backward(dirs) {
		if err := dress(root, dir); err != nil {
			return err
		}
	}
	_, err := io.Copy(io.Discard, body) // padding after the end mark
	if err != nil {
		return tarError(ctx, err)
	}
	return nil
}

func tarError(ctx context.Context, err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) && ctx.Err() == nil {
		return core.Errorf(core.Invalid, core.CodeMalformedBody, "the body is not a complete tar: %s", core.Clip(err.Error()))
	}
	return answer.BodyError(ctx, err)
}

func unpack(ctx context.Context, root *os.Root, tr *tar.Reader, h *tar.Header) error {
	if dir := path.Dir(h.Name); dir != "." {
		if err := root.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if err := root.Mkdir(h.Name, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		return nil
	case tar.TypeReg:
		if err := makeWay(root, h.Name); err != nil {
			return err
		}
		f, err := root.OpenFile(h.Name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		if err := errors.Join(receive(ctx, f, tr), f.Close()); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if err := makeWay(root, h.Name); err != nil {
			return err
		}
		if err := root.Symlink(h.Linkname, h.Name); err != nil {
			return err
		}
		return root.Lchown(h.Name, h.Uid, h.Gid)
	case tar.TypeLink:
		if err := makeWay(root, h.Name); err != nil {
			return err
		}
		return root.Link(path.Clean(strings.TrimLeft(h.Linkname, "/")), h.Name)
	case tar.TypeFifo:
		if err := makeWay(root, h.Name); err != nil {
			return err
		}
		if err := mkfifo(root, h.Name); err != nil {
			return err
		}
	default:
		return core.Errorf(core.Invalid, core.CodeMalformedBody, "the tar has %q, whose type (%q) cannot be unpacked", core.Clip(h.Name), string(h.Typeflag))
	}
	return dress(root, h)
}

// makeWay removes what is in the place of an entry. A directory stays, and the next call fails with an error.
func makeWay(root *os.Root, name string) error {
	fi, err := root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if fi.IsDir() {
		return &fs.PathError{Op: "unpack", Path: name, Err: syscall.EISDIR}
	}
	return root.Remove(name)
}

func mkfifo(root *os.Root, name string) error {
	d, err := root.Open(path.Dir(name))
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return unix.Mknodat(int(d.Fd()), path.Base(name), unix.S_IFIFO|0o600, 0)
}

// dress sets the owner, mode and time of an entry. It sets the mode through a descriptor, because only newer kernels
// can change the mode of a path without following links.
func dress(root *os.Root, h *tar.Header) error {
	if err := root.Lchown(h.Name, h.Uid, h.Gid); err != nil {
		return err
	}
	f, err := root.OpenFile(h.Name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	mode := h.FileInfo().Mode() & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky)
	if err := errors.Join(f.Chmod(mode), f.Close()); err != nil {
		return err
	}
	return root.Chtimes(h.Name, h.ModTime, h.ModTime)
}
