//go:build linux

package files

import (
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/archive"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// MaxTransfer is the bound on one download unless the request has another.
const MaxTransfer = 10 << 30

// Get reads a file, lists a directory, or sends a tree as a tar.
func (s *Server) Get(w http.ResponseWriter, r *http.Request) error {
	c, err := s.asked(r)
	if err != nil {
		return err
	}
	most, err := answer.IntParam(r, "max_bytes", MaxTransfer)
	if err != nil {
		return err
	}
	most = min(most, 1<<62)
	switch {
	case answer.BoolParam(r, "list"):
		return list(w, r, c)
	case answer.BoolParam(r, "tar"):
		return getTar(w, r, c, c.path, most)
	case answer.BoolParam(r, "stat"):
		return stat(w, r, c)
	}
	return readFile(w, r, c, most)
}

// readFile sends a file of at most the given number of bytes. It opens the file with the caller's rights.
func readFile(w http.ResponseWriter, r *http.Request, c caller, most int64) error {
	path := c.path
	var f *os.File
	err := c.do(func() error {
		// O_NONBLOCK, so that a FIFO, or a device that waits for a carrier, does not block.
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
		if err == nil {
			f = os.NewFile(uintptr(fd), path)
		}
		return err
	})
	if err != nil {
		return answer.FileError(err, "read", path)
	}
	defer func() { _ = f.Close() }()
	fi, err := f.Stat()
	if err != nil {
		return answer.FileError(err, "read", path)
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
	if c.user && info.Size == 0 { // files in /proc check the rights of their reader
		return c.do(func() error { return sendFile(w, r, f, 0, most) })
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

// stat describes a path, or with follow the target of a link.
func stat(w http.ResponseWriter, r *http.Request, c caller) error {
	var info guestapi.FileInfo
	err := c.do(func() error {
		d := newDetails(r)
		if !answer.BoolParam(r, "follow") {
			var err error
			info, err = d.look(c.path)
			return err
		}
		fi, err := os.Stat(c.path)
		if err == nil {
			info = d.of(c.path, fi)
			info.Name = filepath.Base(c.path)
			info.Target, _ = filepath.EvalSymlinks(c.path)
		}
		return err
	})
	if err != nil {
		return answer.FileError(err, "look at", c.path)
	}
	answer.WriteJSON(w, http.StatusOK, info)
	return nil
}

// The bounds of a listing.
const (
	MaxListing   = 10_000
	maxListDepth = 64
	maxListText  = 8 << 20 // bytes of paths
)

func list(w http.ResponseWriter, r *http.Request, c caller) error {
	depth, err := answer.IntParam(r, "depth", 1)
	if err != nil {
		return err
	}
	if depth < 1 || depth > maxListDepth {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "depth must be a number from 1 to %d", maxListDepth)
	}
	l := &lister{r: r, out: guestapi.FileList{Path: c.path, Entries: []guestapi.FileInfo{}}}
	err = c.do(func() error {
		l.details = newDetails(r)
		return l.dir(c.path, int(depth), 0)
	})
	if err != nil {
		return answer.FileError(err, "list", c.path)
	}
	answer.WriteJSON(w, http.StatusOK, l.out)
	return nil
}

// lister lists a directory, and its subdirectories.
type lister struct {
	r       *http.Request
	details *details
	out     guestapi.FileList
	text    int
}

// dir lists a directory by name, and after each subdirectory its entries. It does not follow links, except for the path of
// the request.
func (l *lister) dir(path string, depth, flags int) error {
	d, err := os.OpenFile(path, unix.O_DIRECTORY|unix.O_NONBLOCK|flags, 0)
	if err != nil {
		return err
	}
	names, err := d.Readdirnames(MaxListing - len(l.out.Entries) + 1)
	_ = d.Close()
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	slices.Sort(names)
	for _, name := range names {
		p := filepath.Join(path, name)
		if len(l.out.Entries) >= MaxListing || l.text+len(p) > maxListText || l.r.Context().Err() != nil {
			l.out.Truncated = true
			return nil //nolint:nilerr // err is the end of the directory
		}
		info, err := l.details.look(p)
		if err != nil {
			continue // removed meanwhile
		}
		l.text += len(p)
		l.out.Entries = append(l.out.Entries, info)
		if info.Type != "dir" || depth <= 1 {
			continue
		}
		if err := l.dir(p, depth-1, unix.O_NOFOLLOW); err != nil && !errors.Is(err, fs.ErrNotExist) {
			l.out.Unreadable++ // the user may not read it, or it is something else by now
		}
	}
	return nil
}
