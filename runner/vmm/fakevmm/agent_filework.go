package fakevmm

import (
	"maps"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// home makes a path absolute. Every user of the fake guest may do everything.
func home(name, user string) string {
	if rest, ok := strings.CutPrefix(name, "~"); ok && user != "" && (rest == "" || rest[0] == '/') {
		return clean("/home/" + user + rest)
	}
	return clean(name)
}

func depth(r *http.Request) int {
	n, err := strconv.Atoi(r.URL.Query().Get("depth"))
	if err != nil {
		return 1
	}
	return max(n, 1)
}

// written returns the bytes of a file after a write.
func written(r *http.Request, old, data []byte) []byte {
	at, err := strconv.Atoi(r.URL.Query().Get("offset"))
	switch {
	case flag(r, "in_place") && flag(r, "append"):
		return slices.Concat(old, data)
	case flag(r, "in_place") && err == nil && at >= 0 && at <= 64<<20:
		out := slices.Concat(old, make([]byte, max(0, at+len(data)-len(old))))
		copy(out[at:], data)
		return out
	}
	return data
}

func (a *agent) makeDir(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.MakeDir
	if err := readJSON(r, &req); err != nil {
		return err
	}
	name := home(req.Path, req.User)
	var out guestapi.MadeDir
	if err := a.update(func(s *agentState) error {
		info, exists := s.stat(name)
		if exists && (!req.Parents || info.Type != "dir") {
			return core.Errorf(core.Conflict, guestapi.CodeFileConflict, "make the directory %s: it exists", core.Clip(name))
		}
		if _, ok := s.stat(path.Dir(name)); !ok && !req.Parents {
			return noFile("make the directory", name)
		}
		if !exists {
			s.Files[name] = file{Dir: true, Mode: "0755", Changed: time.Now().UTC(), Owner: req.User}
		}
		out.Created = !exists
		out.FileInfo, _ = s.stat(name) // it exists now
		return nil
	}); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func (a *agent) rename(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.Rename
	if err := readJSON(r, &req); err != nil {
		return err
	}
	from, to := home(req.From, req.User), home(req.To, req.User)
	var info guestapi.FileInfo
	if err := a.update(func(s *agentState) error {
		if _, ok := s.stat(from); !ok || from == "/" {
			return noFile("move", from)
		}
		if _, ok := s.stat(to); ok && req.NoReplace || strings.HasPrefix(to, from+"/") {
			return core.Errorf(core.Conflict, guestapi.CodeFileConflict, "move %s: %s exists, or is below it", core.Clip(from), core.Clip(to))
		}
		for _, name := range append(s.below(from), from) {
			if f, ok := s.Files[name]; ok {
				delete(s.Files, name)
				s.Files[to+strings.TrimPrefix(name, from)] = f
			}
		}
		info, _ = s.stat(to) // it exists now
		return nil
	}); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, info)
	return nil
}

func (a *agent) setXAttrs(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.SetXAttrs
	if err := readJSON(r, &req); err != nil {
		return err
	}
	name := home(req.Path, req.User)
	var info guestapi.FileInfo
	if err := a.update(func(s *agentState) error {
		f, ok := s.Files[name]
		if !ok {
			return noFile("change the attributes of", name)
		}
		if f.XAttrs == nil {
			f.XAttrs = map[string]string{}
		}
		maps.Copy(f.XAttrs, req.Set)
		for _, gone := range req.Remove {
			delete(f.XAttrs, gone)
		}
		s.Files[name] = f
		info, _ = s.stat(name) // it exists
		return nil
	}); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, info)
	return nil
}

func (a *agent) sessionDeadline(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.Deadline
	if err := readJSON(r, &req); err != nil {
		return err
	}
	if err := a.with(r, func(_ *agentState, n *session) error {
		if n.State != guestapi.SessionRunning {
			return core.Errorf(core.Conflict, guestapi.CodeSessionEnded, "session %s has ended", n.ID)
		}
		n.KillAt = 0
		if req.TimeoutMS > 0 {
			n.KillAt = a.c.Uptime() + time.Duration(req.TimeoutMS)*time.Millisecond
		}
		return nil
	}); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// fromNow returns the offset that a request means by from=now, or 0.
func fromNow(r *http.Request) int64 {
	if r.URL.Query().Get("from") == "now" {
		return 1 << 62
	}
	return 0
}
