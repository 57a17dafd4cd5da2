//go:build linux

package files

import (
	"errors"
	"net/http"
	"strings"
	"syscall"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// The bounds of extended attributes. Only those of users are served: the others are the kernel's and root's.
const (
	xattrPrefix  = "user."
	maxXAttrs    = 64
	maxXAttrName = 255
	maxXAttr     = 4 << 10
	maxXAttrList = 64 << 10
	maxXAttrText = 256 << 10 // in one answer
)

// readXAttrs returns the attributes of a path that are text, as far as there is room.
func readXAttrs(path string, room *int) (out map[string]string, truncated bool) {
	list := make([]byte, maxXAttrList)
	n, err := unix.Listxattr(path, list)
	if err != nil {
		return nil, errors.Is(err, syscall.ERANGE)
	}
	value := make([]byte, maxXAttr)
	for name := range strings.SplitSeq(string(list[:n]), "\x00") {
		if !strings.HasPrefix(name, xattrPrefix) || !utf8.ValidString(name) {
			continue
		}
		n, err := unix.Getxattr(path, name, value)
		switch {
		case errors.Is(err, syscall.ENODATA):
			continue // removed meanwhile
		case err != nil, !utf8.Valid(value[:n]), len(out) >= maxXAttrs, len(name)+n > *room:
			truncated = true
			continue
		}
		if out == nil {
			out = map[string]string{}
		}
		out[name] = string(value[:n])
		*room -= len(name) + n
	}
	return out, truncated
}

func checkXAttr(name, value string) error {
	switch {
	case !strings.HasPrefix(name, xattrPrefix) || len(name) == len(xattrPrefix) || len(name) > maxXAttrName || strings.ContainsRune(name, 0):
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the name %q must begin with %q and have at most %d bytes", core.Clip(name), xattrPrefix, maxXAttrName)
	case len(value) > maxXAttr:
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the value of %s has %d bytes, more than %d", core.Clip(name), len(value), maxXAttr)
	}
	return nil
}

// SetXAttrs sets and removes extended attributes.
func (s *Server) SetXAttrs(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.SetXAttrs
	if err := answer.ReadJSON(w, r, 2*maxXAttrs*maxXAttr, &req); err != nil {
		return err
	}
	if len(req.Set)+len(req.Remove) > maxXAttrs {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "at most %d attributes can be changed at once", maxXAttrs)
	}
	for name, value := range req.Set {
		if err := checkXAttr(name, value); err != nil {
			return err
		}
	}
	for _, name := range req.Remove {
		if err := checkXAttr(name, ""); err != nil {
			return err
		}
	}
	c, err := s.caller(r.Context(), req.User, &req.Path)
	if err != nil {
		return err
	}
	var info guestapi.FileInfo
	err = c.do(func() error {
		if err := changeXAttrs(req); err != nil {
			return err
		}
		d := newDetails(nil)
		d.xattrs = true
		info, err = d.look(req.Path)
		return err
	})
	if err != nil {
		return answer.FileError(err, "change the attributes of", req.Path)
	}
	answer.WriteJSON(w, http.StatusOK, info)
	return nil
}

func changeXAttrs(req guestapi.SetXAttrs) error {
	for name, value := range req.Set {
		if err := xattrError(unix.Setxattr(req.Path, name, []byte(value), 0), req.Path); err != nil {
			return err
		}
	}
	for _, name := range req.Remove {
		if err := unix.Removexattr(req.Path, name); err != nil && !errors.Is(err, syscall.ENODATA) {
			return xattrError(err, req.Path)
		}
	}
	return nil
}

func xattrError(err error, path string) error {
	switch {
	case errors.Is(err, syscall.ENOTSUP):
		return core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "the file system of %s has no extended attributes of users", core.Clip(path))
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.E2BIG):
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the file system has no room for so many attributes of %s", core.Clip(path))
	}
	return err
}
