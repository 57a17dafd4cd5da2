//go:build linux

package guestagent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/archive"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

const maxListing = 10_000

// maxTransfer is the bound on one download unless the request has another.
const maxTransfer = 10 << 30

// filePath returns the path in a request. A relative path starts where a session of root would start.
func (a *Agent) filePath(r *http.Request) (string, error) {
	p := r.URL.Query().Get("path")
	if p == "" || strings.ContainsRune(p, 0) || len(p) > 4096 {
		return "", core.Errorf(core.Invalid, core.CodeInvalidField, "path must name a file in the sandbox")
	}
	if !filepath.IsAbs(p) {
		err := a.work.inside(func() error {
			p = filepath.Join(defaultDir("/root"), p)
			return nil
		})
		if err != nil {
			return "", err
		}
	}
	return filepath.Clean(p), nil
}

func infoOf(path string, fi fs.FileInfo) guestapi.FileInfo {
	info := guestapi.FileInfo{Path: path, Name: fi.Name(), Type: "other", Size: fi.Size(), MTime: fi.ModTime().UTC()}
	switch {
	case fi.Mode().IsRegular():
		info.Type = "file"
	case fi.IsDir():
		info.Type = "dir"
	case fi.Mode()&fs.ModeSymlink != 0:
		info.Type = "symlink"
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		info.UID, info.GID, info.Mode = int(st.Uid), int(st.Gid), fmt.Sprintf("%04o", st.Mode&0o7777)
	}
	return info
}

// setInfoHeader puts a file's description into a header, which may contain only ASCII.
func setInfoHeader(h http.Header, info guestapi.FileInfo) {
	b, err := json.Marshal(info)
	if err != nil {
		return
	}
	var s strings.Builder
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		b = b[n:]
		switch {
		case r > 0xffff:
			fmt.Fprintf(&s, `\u%04x\u%04x`, 0xd800+(r-0x10000)>>10, 0xdc00+(r-0x10000)&0x3ff)
		case r > 0x7e:
			fmt.Fprintf(&s, `\u%04x`, r)
		default:
			s.WriteRune(r)
		}
	}
	h.Set(guestapi.HeaderFileInfo, s.String())
}

func (a *Agent) getFile(w http.ResponseWriter, r *http.Request) error {
	path, err := a.filePath(r)
	if err != nil {
		return err
	}
	most, err := intParam(r, "max_bytes", maxTransfer)
	if err != nil {
		return err
	}
	most = min(most, 1<<62)
	switch {
	case boolParam(r, "list"):
		return a.listDir(w, path)
	case boolParam(r, "tar"):
		return a.getTar(w, r, path, most)
	case boolParam(r, "stat"):
		return a.statFile(w, path)
	}
	var f *os.File
	err = a.work.inside(func() error {
		// O_NONBLOCK, so that a FIFO, or a device that waits for a carrier, does not block.
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
		if err == nil {
			f = os.NewFile(uintptr(fd), path)
		}
		return err
	})
	if err != nil {
		return fileError(err, "read", path)
	}
	defer func() { _ = f.Close() }()
	fi, err := f.Stat()
	if err != nil {
		return fileError(err, "read", path)
	}
	info := infoOf(path, fi)
	info.Name = filepath.Base(path)
	setInfoHeader(w.Header(), info)
	if info.Type != "file" && r.Method == http.MethodHead {
		w.WriteHeader(http.StatusOK)
		return nil
	}
	if info.Type != "file" {
		w.Header().Del(guestapi.HeaderFileInfo)
		return core.Errorf(core.Conflict, guestapi.CodeFileConflict, "read %s: it is a %s, not a file; a directory can be listed or taken as a tar", core.Clip(path), info.Type)
	}
	if info.Size > most && r.Method != http.MethodHead {
		w.Header().Del(guestapi.HeaderFileInfo)
		return archive.TooLarge(most)
	}
	return sendFile(w, r, f, info.Size, most)
}

// sendFile sends a file of the given size. Files in /proc report a size of 0; of such a file it sends at most the given
// number of bytes.
func sendFile(w http.ResponseWriter, r *http.Request, f *os.File, size, most int64) error {
	w.Header().Set("Content-Type", "application/octet-stream")
	if size > 0 {
		w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	}
	w.WriteHeader(http.StatusOK)
	if r.Method == http.MethodHead {
		return nil
	}
	src := io.LimitReader(f, most+1)
	if size > 0 {
		src = io.LimitReader(f, size) // the file may grow meanwhile
	}
	if n, err := io.Copy(w, src); err != nil || n < size || n > most {
		panic(http.ErrAbortHandler) // it shrank, is too large or the reader is gone: a cut body must not look complete
	}
	return nil
}

func (a *Agent) statFile(w http.ResponseWriter, path string) error {
	var info guestapi.FileInfo
	err := a.work.inside(func() error {
		fi, err := os.Lstat(path)
		if err != nil {
			return err
		}
		if info = infoOf(path, fi); info.Type == "symlink" {
			info.Target, err = os.Readlink(path)
		}
		return err
	})
	if err != nil {
		return fileError(err, "look at", path)
	}
	writeJSON(w, http.StatusOK, info)
	return nil
}

func (a *Agent) listDir(w http.ResponseWriter, path string) error {
	out := guestapi.FileList{Path: path, Entries: []guestapi.FileInfo{}}
	err := a.work.inside(func() error {
		d, err := os.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = d.Close() }()
		names, err := d.Readdirnames(maxListing + 1)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if out.Truncated = len(names) > maxListing; out.Truncated {
			names = names[:maxListing]
		}
		slices.Sort(names)
		for _, name := range names {
			p := filepath.Join(path, name)
			fi, err := os.Lstat(p)
			if err != nil {
				continue // removed meanwhile
			}
			info := infoOf(p, fi)
			if info.Type == "symlink" {
				info.Target, _ = os.Readlink(p)
			}
			out.Entries = append(out.Entries, info)
		}
		return nil
	})
	if err != nil {
		return fileError(err, "list", path)
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// attributes are the attributes that a put may set; -1 means not set.
type attributes struct {
	mode     int64
	uid, gid int
	mkdirs   bool
}

func parseAttributes(r *http.Request) (attributes, error) {
	at := attributes{mode: -1, uid: -1, gid: -1, mkdirs: boolParam(r, "mkdirs")}
	if m := r.URL.Query().Get("mode"); m != "" {
		v, err := strconv.ParseUint(m, 8, 16)
		if err != nil || v > 0o7777 {
			return at, core.Errorf(core.Invalid, core.CodeInvalidField, "mode must be octal digits up to 7777, not %q", core.Clip(m))
		}
		at.mode = int64(v)
	}
	for name, dst := range map[string]*int{"uid": &at.uid, "gid": &at.gid} {
		v, err := intParam(r, name, -1)
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

// putFile writes a temporary file beside its target and renames it, so that nobody ever sees a partial file.
func (a *Agent) putFile(w http.ResponseWriter, r *http.Request) error {
	path, err := a.filePath(r)
	if err != nil {
		return err
	}
	at, err := parseAttributes(r)
	if err != nil {
		return err
	}
	if boolParam(r, "untar") {
		return a.putTar(w, r, path, at)
	}
	var f *os.File
	err = a.work.inside(func() error {
		var err error
		path, f, err = createBeside(path, &at)
		return err
	})
	if err != nil {
		return fileError(err, "write", path)
	}
	err = receive(r.Context(), f, r.Body)
	var info guestapi.FileInfo
	inner := a.work.inside(func() error {
		if err == nil {
			err = finishFile(f, path, at)
		}
		if err != nil {
			_ = os.Remove(f.Name())
			return nil //nolint:nilerr // the outer err has it
		}
		fi, err := os.Lstat(path)
		if err == nil {
			info = infoOf(path, fi)
		}
		return err
	})
	_ = f.Close()
	if err = errors.Join(err, inner); err != nil {
		return fileError(err, "write", path)
	}
	writeJSON(w, http.StatusOK, info)
	return nil
}

// createBeside makes the temporary file for a target, and returns the final target behind symlinks. The owner and mode
// of an existing target are kept unless the request sets them. It is called inside the workload.
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
			keep(&at.uid, int(st.Uid))
			keep(&at.gid, int(st.Gid))
			if at.mode < 0 {
				at.mode = int64(st.Mode & 0o7777)
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
			return bodyError(ctx, err)
		}
	}
}

// finishFile sets the file's owner and mode and renames it to its place. It is called inside the workload.
func finishFile(f *os.File, path string, at attributes) error {
	if err := f.Chown(max(at.uid, 0), max(at.gid, 0)); err != nil {
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

func (a *Agent) deleteFile(w http.ResponseWriter, r *http.Request) error {
	path, err := a.filePath(r)
	if err != nil {
		return err
	}
	if path == "/" {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the root directory cannot be removed")
	}
	err = a.work.inside(func() error {
		if !boolParam(r, "recursive") {
			return os.Remove(path)
		}
		if _, err := os.Lstat(path); err != nil {
			return err
		}
		return os.RemoveAll(path)
	})
	if err != nil {
		return fileError(err, "remove", path)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
