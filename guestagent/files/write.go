//go:build linux

package files

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// attributes are the attributes that a put may set; -1 means not set.
type attributes struct {
	mode     int64
	uid, gid int
	mkdirs   bool
	user     bool // the request names a user, to whom new files belong
}

func parseAttributes(r *http.Request, user bool) (attributes, error) {
	at := attributes{mode: -1, uid: -1, gid: -1, mkdirs: answer.BoolParam(r, "mkdirs"), user: user}
	var err error
	if at.mode, err = parseMode(r.URL.Query().Get("mode")); err != nil {
		return at, err
	}
	for name, dst := range map[string]*int{"uid": &at.uid, "gid": &at.gid} {
		v, err := answer.IntParam(r, name, -1)
		if err != nil {
			return at, err
		}
		if v > 1<<32-2 {
			return at, core.Errorf(core.Invalid, core.CodeInvalidField, "%s is too large", name)
		}
		*dst = int(v)
	}
	return at, nil
}

// parseMode returns -1 for no mode.
func parseMode(m string) (int64, error) {
	if m == "" {
		return -1, nil
	}
	v, err := strconv.ParseUint(m, 8, 16)
	if err != nil || v > 0o7777 {
		return -1, core.Errorf(core.Invalid, core.CodeInvalidField, "mode must be octal digits up to 7777, not %q", core.Clip(m))
	}
	return int64(v), nil
}

// Put unpacks a tar, or writes a file: in place if the request says so, else to a temporary file
// beside the target. Put renames the temporary file when it is complete, so nobody ever sees a
// partial file.
func (s *Server) Put(w http.ResponseWriter, r *http.Request) error {
	c, err := s.asked(r)
	if err != nil {
		return err
	}
	path := c.path
	at, err := parseAttributes(r, c.user)
	if err != nil {
		return err
	}
	switch {
	case answer.BoolParam(r, "untar"):
		return putTar(w, r, c, path, at)
	case answer.BoolParam(r, "in_place"):
		return putInPlace(w, r, c, at)
	}
	var f *os.File
	err = c.do(func() error {
		var err error
		path, f, err = createBeside(path, &at)
		return err
	})
	if err != nil {
		return answer.FileError(err, "write", path)
	}
	err = receive(r.Context(), f, r.Body)
	var info guestapi.FileInfo
	if err == nil {
		err = c.do(func() error {
			if err := finishFile(f, path, at); err != nil {
				return err
			}
			var err error
			info, err = newDetails(nil).look(path)
			return err
		})
	}
	if err != nil {
		_ = c.after(func() error { return os.Remove(f.Name()) }) // it has another name by now if only the last stat has failed
	}
	_ = f.Close()
	if err != nil {
		return answer.FileError(err, "write", path)
	}
	answer.WriteJSON(w, http.StatusOK, info)
	return nil
}

// createBeside makes the temporary file for a target, and returns the final target behind symlinks. The owner and mode
// of an existing target are kept unless the request sets them. For a user it keeps the mode of the user's own files, and
// no setuid, setgid or sticky bit: another's bits would give the user's new file to everybody. It is called with the
// caller's rights.
func createBeside(path string, at *attributes) (string, *os.File, error) {
	if at.mkdirs {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return path, nil, err
		}
	}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	fi, err := os.Lstat(path)
	switch {
	case err == nil && fi.IsDir():
		return path, nil, syscall.EISDIR
	case err == nil && fi.Mode()&fs.ModeSymlink == 0:
		if st, ok := fi.Sys().(*syscall.Stat_t); ok {
			if !at.user {
				keep(&at.uid, int(st.Uid))
				keep(&at.gid, int(st.Gid))
			}
			switch {
			case at.mode >= 0:
			case !at.user:
				at.mode = int64(st.Mode & 0o7777)
			case int(st.Uid) == unix.Geteuid():
				at.mode = int64(st.Mode & 0o777)
			}
		}
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return path, nil, err
	}
	var salt [6]byte
	_, _ = rand.Read(salt[:])
	base := filepath.Base(path)
	name := filepath.Join(filepath.Dir(path), "."+base[:min(len(base), 200)]+".part-"+hex.EncodeToString(salt[:]))
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	return path, f, err
}

func keep(asked *int, existing int) {
	if *asked < 0 {
		*asked = existing
	}
}

// receive copies a body into a file.
func receive(ctx context.Context, f *os.File, body io.Reader) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := body.Read(buf)
		if n > 0 {
			if _, err := f.Write(buf[:n]); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return answer.BodyError(ctx, err)
		}
	}
}

// finishFile sets the file's owner and mode and renames it to its place. It is called with the caller's rights.
func finishFile(f *os.File, path string, at attributes) error {
	if err := giveTo(f, at); err != nil {
		return err
	}
	mode := int64(0o644)
	if at.mode >= 0 {
		mode = at.mode
	}
	if err := unix.Fchmod(int(f.Fd()), uint32(mode)); err != nil { // after chown, which clears setuid
		return err
	}
	return os.Rename(f.Name(), path)
}

// giveTo sets the owner of a new file. A user's file is the user's already.
func giveTo(f *os.File, at attributes) error {
	switch {
	case !at.user:
		return f.Chown(max(at.uid, 0), max(at.gid, 0))
	case at.uid < 0 && at.gid < 0:
		return nil
	}
	return f.Chown(at.uid, at.gid)
}

// Delete removes a file, or a directory with all that is in it.
func (s *Server) Delete(w http.ResponseWriter, r *http.Request) error {
	c, err := s.asked(r)
	if err != nil {
		return err
	}
	path := c.path
	if path == "/" {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the root directory cannot be removed")
	}
	err = c.do(func() error {
		if !answer.BoolParam(r, "recursive") {
			return os.Remove(path)
		}
		if _, err := os.Lstat(path); err != nil {
			return err
		}
		return os.RemoveAll(path)
	})
	if err != nil {
		return answer.FileError(err, "remove", path)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
