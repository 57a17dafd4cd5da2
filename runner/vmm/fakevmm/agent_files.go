package fakevmm

import (
	"encoding/json"
	"io"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// file is a file or directory of the guest. A directory also exists if a file in it exists.
type file struct {
	Data    []byte
	Mode    string // four octal digits
	Changed time.Time
	Dir     bool              `json:",omitempty"`
	Owner   string            `json:",omitempty"` // who made it as a user
	XAttrs  map[string]string `json:",omitempty"`
}

func clean(name string) string { return path.Clean("/" + name) }

// stat describes a path; false when nothing is there.
func (s *agentState) stat(name string) (guestapi.FileInfo, bool) {
	info := guestapi.FileInfo{Path: name, Name: path.Base(name), Type: "dir", Mode: "0755"}
	if f, ok := s.Files[name]; ok {
		info.Mode, info.Size, info.MTime, info.Owner, info.XAttrs = f.Mode, int64(len(f.Data)), f.Changed, f.Owner, f.XAttrs
		if !f.Dir {
			info.Type = "file"
		}
		return info, true
	}
	return info, name == "/" || len(s.below(name)) > 0
}

// below returns the names of the files under a directory.
func (s *agentState) below(dir string) []string {
	var out []string
	for _, name := range sortedNames(s.Files) {
		if strings.HasPrefix(name, strings.TrimSuffix(dir, "/")+"/") {
			out = append(out, name)
		}
	}
	return out
}

func noFile(verb, name string) error {
	return core.Errorf(core.NotFound, core.CodeFileNotFound, "%s %s: there is no such file or directory in the sandbox", verb, core.Clip(name))
}

func flag(r *http.Request, name string) bool {
	v, err := strconv.ParseBool(r.URL.Query().Get(name))
	return err == nil && v
}

func (a *agent) getFile(w http.ResponseWriter, r *http.Request) error {
	name := home(r.URL.Query().Get("path"), r.URL.Query().Get("user"))
	if flag(r, "tar") {
		return core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "a fake guest has no tar")
	}
	var info guestapi.FileInfo
	var data []byte
	list := guestapi.FileList{Path: name, Entries: []guestapi.FileInfo{}}
	if err := a.view(func(s *agentState) error {
		var ok bool
		if info, ok = s.stat(name); !ok {
			return noFile("read", name)
		}
		data = s.Files[name].Data
		seen := map[string]bool{}
		for _, f := range s.below(name) {
			elements := strings.Split(strings.TrimPrefix(f[len(strings.TrimSuffix(name, "/")):], "/"), "/")
			for n := range min(len(elements), depth(r)) {
				below := path.Join(name, path.Join(elements[:n+1]...))
				if !seen[below] {
					seen[below] = true
					entry, _ := s.stat(below) // it exists: f is this entry or below it
					list.Entries = append(list.Entries, entry)
				}
			}
		}
		return nil
	}); err != nil {
		return err
	}
	switch {
	case flag(r, "stat"):
		writeJSON(w, http.StatusOK, info)
	case flag(r, "list"):
		if info.Type != "dir" {
			return core.Errorf(core.Conflict, guestapi.CodeFileConflict, "list %s: not a directory", core.Clip(name))
		}
		writeJSON(w, http.StatusOK, list)
	case info.Type == "dir":
		return core.Errorf(core.Conflict, guestapi.CodeFileConflict, "read %s: is a directory", core.Clip(name))
	default:
		b, err := json.Marshal(info)
		if err != nil {
			return err
		}
		w.Header().Set(guestapi.HeaderFileInfo, string(b))
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Length", strconv.Itoa(len(data)))
		_, _ = w.Write(data) // an error means that the host is gone
	}
	return nil
}

func (a *agent) putFile(w http.ResponseWriter, r *http.Request) error {
	if flag(r, "untar") {
		return core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "a fake guest has no tar")
	}
	user := r.URL.Query().Get("user")
	name := home(r.URL.Query().Get("path"), user)
	data, err := io.ReadAll(io.LimitReader(r.Body, 64<<20))
	if err != nil {
		return core.Errorf(core.Invalid, core.CodeMalformedBody, "the request's body broke off: %s", core.Clip(err.Error()))
	}
	mode := r.URL.Query().Get("mode")
	if mode == "" {
		mode = "0644"
	}
	var info guestapi.FileInfo
	if err := a.update(func(s *agentState) error {
		if old, ok := s.stat(name); ok && old.Type == "dir" {
			return core.Errorf(core.Conflict, guestapi.CodeFileConflict, "write %s: is a directory", core.Clip(name))
		}
		old := s.Files[name]
		if _, exists := s.Files[name]; !exists {
			old.Owner = user
		}
		s.Files[name] = file{Data: written(r, old.Data, data), Mode: mode, Changed: time.Now().UTC(), Owner: old.Owner, XAttrs: old.XAttrs}
		info, _ = s.stat(name) // it exists now
		return nil
	}); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, info)
	return nil
}

func (a *agent) deleteFile(w http.ResponseWriter, r *http.Request) error {
	name := home(r.URL.Query().Get("path"), r.URL.Query().Get("user"))
	if err := a.update(func(s *agentState) error {
		info, ok := s.stat(name)
		switch {
		case !ok:
			return noFile("delete", name)
		case info.Type == "dir" && len(s.below(name)) > 0 && !flag(r, "recursive"):
			return core.Errorf(core.Conflict, guestapi.CodeFileConflict, "delete %s: directory not empty", core.Clip(name))
		}
		delete(s.Files, name)
		for _, f := range s.below(name) {
			delete(s.Files, f)
		}
		return nil
	}); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
