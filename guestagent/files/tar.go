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
	"time"
	"unsafe"

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
	var dirs []madeDir // their modes and times are set last, when nothing more is written into them
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
			h.Uid = at.uid // a new file of a user belongs to the user
		}
		if at.user || at.gid >= 0 {
			h.Gid = at.gid
		}
		if h.Typeflag != tar.TypeDir {
			if err := unpack(ctx, root, tr, h); err != nil {
				return err
			}
			continue
		}
		dir, err := unpackDir(root, h)
		if err != nil {
			return err
		}
		if dir.header != nil {
			dirs = append(dirs, dir)
		}
	}
	for _, dir := range slices.Backward(dirs) {
		if err := dir.dress(root); err != nil {
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

// unpack makes an entry that is not a directory. It changes the attributes of the entry through a
// descriptor: a user of the sandbox who owns the directory can put another file in the entry's
// place at any time.
func unpack(ctx context.Context, root *os.Root, tr *tar.Reader, h *tar.Header) error {
	if err := makeParents(root, h.Name); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeSymlink, tar.TypeLink, tar.TypeFifo:
		if err := makeWay(root, h.Name); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeReg:
		f, err := root.OpenFile(h.Name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		err = receive(ctx, f, tr)
		if err == nil {
			err = dress(f, h)
		}
		return errors.Join(err, f.Close())
	case tar.TypeSymlink:
		if err := root.Symlink(h.Linkname, h.Name); err != nil {
			return err
		}
		return withMade(root, h.Name, unix.O_PATH, unix.S_IFLNK, func(f *os.File) error {
			return unix.Fchownat(int(f.Fd()), "", h.Uid, h.Gid, unix.AT_EMPTY_PATH)
		})
	case tar.TypeLink:
		return root.Link(path.Clean(strings.TrimLeft(h.Linkname, "/")), h.Name)
	case tar.TypeFifo:
		if err := mkfifo(root, h.Name); err != nil {
			return err
		}
		return withMade(root, h.Name, unix.O_RDONLY|unix.O_NONBLOCK, unix.S_IFIFO, func(f *os.File) error { return dress(f, h) })
	}
	return core.Errorf(core.Invalid, core.CodeMalformedBody, "the tar has %q, whose type (%q) cannot be unpacked", core.Clip(h.Name), string(h.Typeflag))
}

func makeParents(root *os.Root, name string) error {
	if dir := path.Dir(name); dir != "." {
		return root.MkdirAll(dir, 0o755)
	}
	return nil
}

// madeDir is a directory of the tar, with the identity that it had when it was made or found.
type madeDir struct {
	header   *tar.Header
	dev, ino uint64
}

// unpackDir makes a directory, or finds it. A link to a directory stays as it is, and has no header in the result.
func unpackDir(root *os.Root, h *tar.Header) (madeDir, error) {
	if err := makeParents(root, h.Name); err != nil {
		return madeDir{}, err
	}
	err := root.Mkdir(h.Name, 0o755)
	if errors.Is(err, fs.ErrExist) {
		if fi, err := root.Lstat(h.Name); err == nil && fi.Mode()&fs.ModeSymlink != 0 {
			if fi, err = root.Stat(h.Name); err == nil && fi.IsDir() {
				return madeDir{}, nil
			}
		}
	} else if err != nil {
		return madeDir{}, err
	}
	f, st, err := openEntry(root, h.Name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return madeDir{}, err
	}
	return madeDir{header: h, dev: st.Dev, ino: st.Ino}, f.Close()
}

// dress sets the attributes of the directory, unless another one is in its place by now.
func (d madeDir) dress(root *os.Root) error {
	f, st, err := openEntry(root, d.header.Name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	if st.Dev != d.dev || st.Ino != d.ino {
		return errors.Join(replaced(d.header.Name), f.Close())
	}
	return errors.Join(dress(f, d.header), f.Close())
}

func replaced(name string) error {
	return core.Errorf(core.Conflict, guestapi.CodeFileConflict, "unpack %s: something else was put in its place meanwhile; unpack the tar again", core.Clip(name))
}

// withMade runs fn with an entry that has just been made and has no descriptor. It fails if the
// entry has another type, another owner or several names: then something else has taken its place.
func withMade(root *os.Root, name string, flags int, kind uint32, fn func(f *os.File) error) error {
	f, st, err := openEntry(root, name, flags)
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != kind || st.Nlink != 1 || int(st.Uid) != unix.Geteuid() {
		return errors.Join(replaced(name), f.Close())
	}
	return errors.Join(fn(f), f.Close())
}

// openEntry opens an entry by its name, and follows no link.
func openEntry(root *os.Root, name string, flags int) (*os.File, unix.Stat_t, error) {
	var st unix.Stat_t
	dir, err := root.Open(path.Dir(name))
	if err != nil {
		return nil, st, err
	}
	defer func() { _ = dir.Close() }()
	fd, err := unix.Openat(int(dir.Fd()), path.Base(name), flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, st, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, st, errors.Join(err, f.Close())
	}
	return f, st, nil
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

// dress sets the owner, mode and time of an open entry.
func dress(f *os.File, h *tar.Header) error {
	if err := f.Chown(h.Uid, h.Gid); err != nil {
		return err
	}
	if err := f.Chmod(h.FileInfo().Mode() & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky)); err != nil {
		return err
	}
	return setTime(f, h.ModTime)
}

// setTime sets the times of an open file. Package unix sets them by a path only.
func setTime(f *os.File, t time.Time) error {
	ts := [2]unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_OMIT}}
	if !t.IsZero() {
		one, err := unix.TimeToTimespec(t)
		if err != nil {
			return err
		}
		ts = [2]unix.Timespec{one, one}
	}
	if _, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, f.Fd(), 0, uintptr(unsafe.Pointer(&ts[0])), 0, 0, 0); errno != 0 {
		return &fs.PathError{Op: "set the time of", Path: f.Name(), Err: errno}
	}
	return nil
}
