//go:build linux

package files

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"syscall"
	"unicode/utf8"

	"github.com/coppice-dev/coppice/guestagent/account"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

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

// details adds fields that need more than a stat: names, the target of a link, extended attributes.
type details struct {
	names  account.Names
	xattrs bool
	room   int // bytes of extended attributes that the answer has room for
}

func newDetails(r *http.Request) *details {
	d := &details{names: account.AllNames(), room: maxXAttrText}
	if r != nil {
		d.xattrs = answer.BoolParam(r, "xattrs")
	}
	return d
}

// of describes a path after its stat.
func (d *details) of(path string, fi fs.FileInfo) guestapi.FileInfo {
	info := infoOf(path, fi)
	info.Owner, info.Group = d.names.Users[info.UID], d.names.Groups[info.GID]
	if info.Type == "symlink" {
		info.Target, _ = os.Readlink(path)
	}
	if d.xattrs && (info.Type == "file" || info.Type == "dir") {
		info.XAttrs, info.XAttrsTruncated = readXAttrs(path, &d.room)
	}
	return info
}

// look describes a path.
func (d *details) look(path string) (guestapi.FileInfo, error) {
	fi, err := os.Lstat(path)
	if err != nil {
		return guestapi.FileInfo{}, err
	}
	return d.of(path, fi), nil
}
