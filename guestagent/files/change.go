//go:build linux

package files

import (
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// maxBody bounds the body of a request that has no file in it.
const maxBody = 256 << 10

// putInPlace writes a body into the file itself: programs that have the file open see it, and a
// body that breaks off leaves the bytes that have arrived. All of it happens with the caller's
// rights, because the kernel takes setuid bits away from a file only when a user writes it.
func putInPlace(w http.ResponseWriter, r *http.Request, c caller, at attributes) error {
	offset, err := answer.IntParam(r, "offset", -1)
	if err != nil {
		return err
	}
	end := answer.BoolParam(r, "append")
	if end && offset >= 0 {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "only one of offset and append can be given")
	}
	var info guestapi.FileInfo
	err = c.do(func() error {
		f, err := openInPlace(c.path, at, end)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		switch {
		case end:
		case offset < 0:
			err = empty(f)
		default:
			_, err = f.Seek(offset, io.SeekStart)
		}
		if err == nil {
			err = receive(r.Context(), f, r.Body)
		}
		if err != nil {
			return err
		}
		fi, err := f.Stat()
		if err != nil {
			return err
		}
		info = newDetails(nil).of(c.path, fi)
		info.Name = filepath.Base(c.path)
		return f.Close()
	})
	if err != nil {
		return answer.FileError(err, "write", c.path)
	}
	answer.WriteJSON(w, http.StatusOK, info)
	return nil
}

// empty makes a file empty. Watchers would see a write if an empty file, such as a new one, was truncated.
func empty(f *os.File) error {
	fi, err := f.Stat()
	if err != nil || fi.Size() == 0 {
		return err
	}
	return f.Truncate(0)
}

// openInPlace opens a file for writing, or makes it. Only files can be written: a FIFO or a device would block.
func openInPlace(path string, at attributes, end bool) (*os.File, error) {
	flags := os.O_WRONLY | unix.O_NONBLOCK | unix.O_NOCTTY
	if end {
		flags |= os.O_APPEND
	}
	f, err := os.OpenFile(path, flags, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return makeInPlace(path, at, flags)
	}
	if err != nil {
		return nil, err
	}
	return prepareInPlace(f, path, at)
}

// prepareInPlace checks an open file that existed, and sets what the request sets.
func prepareInPlace(f *os.File, path string, at attributes) (*os.File, error) {
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = &fs.PathError{Op: "write", Path: path, Err: syscall.EISDIR}
	}
	if err == nil && (at.uid >= 0 || at.gid >= 0) {
		err = f.Chown(at.uid, at.gid)
	}
	if err == nil && at.mode >= 0 {
		err = unix.Fchmod(int(f.Fd()), uint32(at.mode))
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// makeInPlace makes a file. The flags have O_NONBLOCK, because a pipe or a device may have taken its place meanwhile.
func makeInPlace(path string, at attributes, flags int) (*os.File, error) {
	if at.mkdirs {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, err
		}
	}
	f, err := os.OpenFile(path, flags|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) { // a link to a file that does not exist yet, or it was made meanwhile
		if f, err = os.OpenFile(path, flags|os.O_CREATE, 0o600); err != nil {
			return nil, err
		}
		return prepareInPlace(f, path, at)
	}
	if err != nil {
		return nil, err
	}
	mode := int64(0o644)
	if at.mode >= 0 {
		mode = at.mode
	}
	if err := giveTo(f, at); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := unix.Fchmod(int(f.Fd()), uint32(mode)); err != nil { // after chown, which clears setuid
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// MakeDir makes a directory.
func (s *Server) MakeDir(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.MakeDir
	if err := answer.ReadJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	c, err := s.caller(r.Context(), req.User, &req.Path)
	if err != nil {
		return err
	}
	mode, err := parseMode(req.Mode)
	if err != nil {
		return err
	}
	var out guestapi.MadeDir
	err = c.do(func() error {
		if out.Created, err = makeDir(req.Path, mode, req.Parents); err != nil {
			return err
		}
		out.FileInfo, err = newDetails(nil).look(req.Path)
		return err
	})
	if err != nil {
		return answer.FileError(err, "make the directory", req.Path)
	}
	answer.WriteJSON(w, http.StatusOK, out)
	return nil
}

func makeDir(path string, mode int64, parents bool) (made bool, err error) {
	if parents {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return false, err
		}
	}
	err = os.Mkdir(path, 0o755)
	if errors.Is(err, fs.ErrExist) && parents {
		if fi, err := os.Stat(path); err == nil && fi.IsDir() {
			return false, nil
		}
	}
	if err != nil || mode < 0 {
		return err == nil, err
	}
	// Through a descriptor, so that a link in its place is not followed.
	d, err := os.OpenFile(path, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return true, err
	}
	return true, errors.Join(unix.Fchmod(int(d.Fd()), uint32(mode)), d.Close())
}

// Rename moves a file or a directory.
func (s *Server) Rename(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.Rename
	if err := answer.ReadJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	c, err := s.caller(r.Context(), req.User, &req.From, &req.To)
	if err != nil {
		return err
	}
	var info guestapi.FileInfo
	err = c.do(func() error {
		if _, err := os.Lstat(req.From); err != nil {
			return err
		}
		if req.Mkdirs {
			if err := os.MkdirAll(filepath.Dir(req.To), 0o755); err != nil {
				return err
			}
		}
		flags := uint(0)
		if req.NoReplace {
			flags = unix.RENAME_NOREPLACE
		}
		if err := unix.Renameat2(unix.AT_FDCWD, req.From, unix.AT_FDCWD, req.To, flags); err != nil {
			return err
		}
		info, err = newDetails(nil).look(req.To)
		return err
	})
	if errors.Is(err, syscall.EXDEV) {
		return core.Errorf(core.Conflict, guestapi.CodeFileConflict, "move %s: %s is on another file system; copy it and remove the original", core.Clip(req.From), core.Clip(req.To))
	}
	if err != nil {
		return answer.FileError(err, "move", req.From)
	}
	answer.WriteJSON(w, http.StatusOK, info)
	return nil
}
