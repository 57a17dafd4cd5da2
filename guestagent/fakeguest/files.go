package fakeguest

import (
	"archive/tar"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// File is a file or a directory. Nothing writes Data and XAttrs again, so copies share them.
type File struct {
	Data    []byte            `json:",omitempty"`
	Dir     bool              `json:",omitempty"`
	Mode    string            `json:",omitempty"` // four octal digits; empty: the default
	Owner   string            `json:",omitempty"`
	XAttrs  map[string]string `json:",omitempty"`
	Changed time.Time         `json:",omitzero"`
}

func clean(name string) string { return path.Clean("/" + name) }

// meaning is the path that a user means: the home of a user is below /home.
func meaning(p, user string) string {
	if rest, ok := strings.CutPrefix(p, "~"); ok {
		p = "/home/" + user + rest
	}
	return clean(p)
}

// asked returns the path that a request names, for its user.
func asked(r *http.Request) string {
	return meaning(r.URL.Query().Get("path"), r.URL.Query().Get("user"))
}

func conflict(p, why string) error {
	return core.Errorf(core.Conflict, guestapi.CodeFileConflict, "%s %s", core.Clip(p), why)
}

// Stat describes a path.
func (s *State) Stat(p string) (guestapi.FileInfo, error) {
	f, ok := s.Files[p]
	if !ok && p != "/" && len(s.Below(p)) == 0 {
		return guestapi.FileInfo{}, core.Errorf(core.NotFound, core.CodeFileNotFound, "%s: there is no such file in the sandbox", core.Clip(p))
	}
	info := guestapi.FileInfo{
		Path: p, Name: path.Base(p), Type: "file", Mode: cmp.Or(f.Mode, "0644"), Size: int64(len(f.Data)), MTime: f.Changed, Owner: f.Owner, XAttrs: f.XAttrs,
	}
	if f.Dir || !ok {
		info.Type, info.Mode = "dir", cmp.Or(f.Mode, "0755")
	}
	return info, nil
}

// Below lists the paths below a directory, sorted.
func (s *State) Below(dir string) []string {
	prefix := strings.TrimSuffix(dir, "/") + "/"
	var out []string
	for p := range s.Files {
		for ; strings.HasPrefix(p, prefix) && p != prefix; p = path.Dir(p) { // a directory is there while a file in it is
			out = append(out, p)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func (s *State) put(p string, f File) {
	f.Changed = time.Now().UTC()
	s.Files[p] = f
}

func (g *Guest) getFile(w http.ResponseWriter, r *http.Request) error {
	p := asked(r)
	var info guestapi.FileInfo
	var data []byte
	var list []guestapi.FileInfo
	archive := new(bytes.Buffer)
	if err := g.view(func(s *State) (err error) {
		if info, err = s.Stat(p); err != nil {
			return err
		}
		dir := info.Type == "dir"
		switch {
		case answer.BoolParam(r, "stat"):
		case answer.BoolParam(r, "tar"):
			err = s.tar(archive, p)
		case answer.BoolParam(r, "list") != dir:
			err = conflict(p, "is a "+info.Type)
		case dir:
			list, err = s.list(r, p)
		default:
			data = s.Files[p].Data
		}
		return err
	}); err != nil {
		return err
	}
	h := w.Header()
	switch {
	case answer.BoolParam(r, "tar"):
		h.Set("Content-Type", "application/x-tar")
		h.Set("Trailer", guestapi.HeaderStatus)
		_, _ = archive.WriteTo(w) // the reader may have gone
		h.Set(guestapi.HeaderStatus, "ok")
	case answer.BoolParam(r, "list"):
		answer.WriteJSON(w, http.StatusOK, guestapi.FileList{Path: p, Entries: list})
	case answer.BoolParam(r, "stat"):
		answer.WriteJSON(w, http.StatusOK, info)
	default:
		b, err := json.Marshal(info)
		if err != nil {
			return err
		}
		h.Set(guestapi.HeaderFileInfo, string(b))
		h.Set("Content-Type", "application/octet-stream")
		h.Set("Content-Length", strconv.Itoa(len(data)))
		if r.Method == http.MethodGet {
			_, _ = w.Write(data) // the reader may have gone
		}
	}
	return nil
}

// list lists a directory, and directories below it as far as the request asks for it.
func (s *State) list(r *http.Request, dir string) ([]guestapi.FileInfo, error) {
	levels, err := answer.IntParam(r, "depth", 1)
	entries := []guestapi.FileInfo{}
	for _, p := range s.Below(dir) {
		if strings.Count(strings.TrimPrefix(p, strings.TrimSuffix(dir, "/")), "/") <= int(max(levels, 1)) {
			info, _ := s.Stat(p) // it is there
			entries = append(entries, info)
		}
	}
	return entries, err
}

func (g *Guest) putFile(w http.ResponseWriter, r *http.Request) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		return answer.BodyError(r.Context(), err)
	}
	p, query := asked(r), r.URL.Query()
	return respond(g, w, http.StatusOK, func(s *State) (guestapi.FileInfo, error) {
		if answer.BoolParam(r, "untar") {
			if err := s.untar(p, body); err != nil {
				return guestapi.FileInfo{}, core.Errorf(core.Invalid, core.CodeMalformedBody, "the archive cannot be read: %s", core.Clip(err.Error()))
			}
			return s.Stat(p)
		}
		f, ok := s.Files[p]
		if f.Dir {
			return guestapi.FileInfo{}, conflict(p, "is a directory")
		}
		if !ok {
			f.Owner = query.Get("user")
			s.notify(guestapi.WatchCreate, p)
		}
		f.Mode = cmp.Or(query.Get("mode"), f.Mode)
		f.Data = written(f.Data, body, r)
		s.put(p, f)
		s.notify(guestapi.WatchWrite, p)
		return s.Stat(p)
	})
}

// written returns the bytes of a file after a write.
func written(old, body []byte, r *http.Request) []byte {
	if !answer.BoolParam(r, "in_place") {
		return body
	}
	if answer.BoolParam(r, "append") {
		return slices.Concat(old, body)
	}
	at, err := strconv.Atoi(r.URL.Query().Get("offset"))
	if err != nil {
		return body
	}
	out := slices.Concat(old, make([]byte, max(0, at+len(body)-len(old))))
	copy(out[at:], body)
	return out
}

func (s *State) deleteFile(r *http.Request) (none, error) {
	p := asked(r)
	if _, err := s.Stat(p); err != nil {
		return none{}, err
	}
	below := s.Below(p)
	if len(below) > 0 && !answer.BoolParam(r, "recursive") {
		return none{}, conflict(p, "is not empty")
	}
	for _, gone := range append(below, p) {
		delete(s.Files, gone)
		s.notify(guestapi.WatchRemove, gone)
	}
	return none{}, nil
}

func (s *State) makeDir(_ *http.Request, req guestapi.MakeDir) (out guestapi.MadeDir, err error) {
	p := meaning(req.Path, req.User)
	_, missing := s.Stat(p)
	if missing == nil && !req.Parents {
		return out, conflict(p, "exists")
	}
	if out.Created = missing != nil; out.Created {
		s.mkdir(p, req.User)
	}
	out.FileInfo, err = s.Stat(p)
	return out, err
}

// mkdir makes a directory and those above it.
func (s *State) mkdir(p, user string) {
	for ; p != "/"; p = path.Dir(p) {
		if _, ok := s.Files[p]; !ok {
			s.put(p, File{Dir: true, Owner: user})
			s.notify(guestapi.WatchCreate, p)
		}
	}
}

func (s *State) rename(_ *http.Request, req guestapi.Rename) (guestapi.FileInfo, error) {
	from, to := meaning(req.From, req.User), meaning(req.To, req.User)
	if _, err := s.Stat(to); err == nil && req.NoReplace {
		return guestapi.FileInfo{}, conflict(to, "exists")
	}
	if err := s.move(from, to); err != nil {
		return guestapi.FileInfo{}, err
	}
	return s.Stat(to)
}

func (s *State) move(from, to string) error {
	if _, err := s.Stat(from); err != nil {
		return err
	}
	for _, p := range append(s.Below(from), from) {
		if f, ok := s.Files[p]; ok {
			delete(s.Files, p)
			s.Files[to+strings.TrimPrefix(p, from)] = f
		}
	}
	s.notify(guestapi.WatchRename, from)
	s.notify(guestapi.WatchCreate, to)
	return nil
}

func (s *State) setXAttrs(_ *http.Request, req guestapi.SetXAttrs) (guestapi.FileInfo, error) {
	p := meaning(req.Path, req.User)
	info, err := s.Stat(p)
	if err != nil {
		return info, err
	}
	f := s.Files[p]
	f.Dir, f.XAttrs = info.Type == "dir", maps.Clone(f.XAttrs)
	if f.XAttrs == nil {
		f.XAttrs = map[string]string{}
	}
	maps.Copy(f.XAttrs, req.Set)
	for _, name := range req.Remove {
		delete(f.XAttrs, name)
	}
	s.put(p, f)
	return s.Stat(p)
}

// tar writes the files below a directory, or one file.
func (s *State) tar(w io.Writer, top string) error {
	tw := tar.NewWriter(w)
	for _, p := range append(s.Below(top), top) {
		f, ok := s.Files[p]
		if !ok || f.Dir {
			continue
		}
		name := path.Join(path.Base(top), strings.TrimPrefix(p, strings.TrimSuffix(top, "/")))
		h := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(f.Data)), Format: tar.FormatPAX}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if _, err := tw.Write(f.Data); err != nil {
			return err
		}
	}
	return tw.Close()
}

// untar keeps the regular files of an archive.
func (s *State) untar(dir string, archive []byte) error {
	made := map[string]File{}
	for tr := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		b, err := io.ReadAll(tr)
		if err != nil {
			return err
		}
		made[path.Join(dir, h.Name)] = File{Data: b, Changed: h.ModTime} //nolint:gosec // G305: a name in memory
	}
	maps.Copy(s.Files, made)
	return nil
}
