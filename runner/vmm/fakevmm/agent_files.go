package fakevmm

import (
	"encoding/json"
	"io"
	"net/http"
	"path"
	"strconv"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// file is a file of the guest. There are no directories.
type file struct {
	Data    []byte
	Mode    string // four octal digits
	Changed time.Time
}

func clean(name string) string { return path.Clean("/" + name) }

// stat describes a file.
func (s *agentState) stat(verb, name string) (guestapi.FileInfo, error) {
	f, ok := s.Files[name]
	if !ok {
		return guestapi.FileInfo{}, core.Errorf(core.NotFound, core.CodeFileNotFound, "%s %s: there is no such file in the sandbox", verb, core.Clip(name))
	}
	return guestapi.FileInfo{Path: name, Name: path.Base(name), Type: "file", Mode: f.Mode, Size: int64(len(f.Data)), MTime: f.Changed}, nil
}

func (a *agent) getFile(w http.ResponseWriter, r *http.Request) error {
	for _, name := range []string{"tar", "list"} {
		if flag(r, name) {
			return core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "a fake guest cannot answer %s", name)
		}
	}
	var info guestapi.FileInfo
	var data []byte
	if err := a.view(func(s *agentState) (err error) {
		name := clean(r.URL.Query().Get("path"))
		info, err = s.stat("read", name)
		data = s.Files[name].Data
		return err
	}); err != nil {
		return err
	}
	if flag(r, "stat") {
		writeJSON(w, http.StatusOK, info)
		return nil
	}
	b, err := json.Marshal(info)
	if err != nil {
		return err
	}
	w.Header().Set(guestapi.HeaderFileInfo, string(b))
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.Itoa(len(data)))
	_, _ = w.Write(data) // an error means that the host is gone
	return nil
}

func (a *agent) putFile(w http.ResponseWriter, r *http.Request) error {
	for _, name := range []string{"untar", "in_place"} {
		if flag(r, name) {
			return core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "a fake guest cannot answer %s", name)
		}
	}
	data, err := io.ReadAll(io.LimitReader(r.Body, 64<<20))
	if err != nil {
		return core.Errorf(core.Invalid, core.CodeMalformedBody, "the request's body broke off: %s", core.Clip(err.Error()))
	}
	mode := r.URL.Query().Get("mode")
	if mode == "" {
		mode = "0644"
	}
	var info guestapi.FileInfo
	if err := a.update(func(s *agentState) (err error) {
		name := clean(r.URL.Query().Get("path"))
		s.Files[name] = file{Data: data, Mode: mode, Changed: time.Now().UTC()}
		info, err = s.stat("write", name)
		return err
	}); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, info)
	return nil
}

func (a *agent) deleteFile(w http.ResponseWriter, r *http.Request) error {
	if err := a.update(func(s *agentState) error {
		name := clean(r.URL.Query().Get("path"))
		_, err := s.stat("delete", name)
		delete(s.Files, name)
		return err
	}); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
