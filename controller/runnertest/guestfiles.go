package runnertest

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// about is what a guest knows of a path besides its bytes.
type about struct {
	dir    bool
	owner  string
	xattrs map[string]string // never written again once stored
}

// look describes a path. The caller holds mu.
func (g *guest) look(p string) (controller.GuestFile, bool) {
	a, known := g.about[p]
	b, file := g.files[p]
	info := controller.GuestFile{Path: p, Name: path.Base(p), Type: "file", Size: int64(len(b)), Mode: "0644", MTime: time.Now().UTC(), Owner: a.owner, XAttrs: a.xattrs}
	if !file {
		info.Type, info.Mode = "dir", "0755"
	}
	return info, file || known && a.dir || p == "/" || len(g.below(p)) > 0
}

// below lists what is below a path, by name. The caller holds mu.
func (g *guest) below(dir string) []string {
	var out []string
	for p := range g.files {
		for ; p != "/" && p != "."; p = path.Dir(p) { // a directory is there while a file in it is
			out = append(out, p)
		}
	}
	for p, a := range g.about {
		if a.dir {
			out = append(out, p)
		}
	}
	out = slices.DeleteFunc(out, func(p string) bool { return !strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/") || p == dir })
	slices.Sort(out)
	return slices.Compact(out)
}

// home is where a fake user lives.
func home(p, user string) string {
	if rest, ok := strings.CutPrefix(p, "~"); ok {
		return "/home/" + user + rest
	}
	return p
}

func noFile(p string) error {
	return core.Errorf(core.NotFound, core.CodeFileNotFound, "%s: no such file", p)
}

func (g *guest) serveFile(w http.ResponseWriter, q *http.Request) {
	query := q.URL.Query()
	p := home(query.Get("path"), query.Get("user"))
	var body []byte
	if q.Method == http.MethodPut {
		var err error
		if body, err = io.ReadAll(q.Body); err != nil {
			reply(w, nil, errors.Join(ErrVanish, err))
			return
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	info, ok := g.look(p)
	switch {
	case q.Method == http.MethodPut && query.Get("untar") != "":
		if err := g.untar(p, body); err != nil {
			reply(w, nil, core.Errorf(core.Invalid, core.CodeMalformedBody, "untar: %v", err))
			return
		}
		info, _ = g.look(p)
		reply(w, info, nil)
	case q.Method == http.MethodPut:
		g.files[p] = written(g.files[p], body, query.Get("in_place") == "1", query.Get("append") == "1", query.Get("offset"))
		if !ok {
			g.about[p] = about{owner: query.Get("user")}
			g.notify("create", p)
		}
		g.notify("write", p)
		info, _ = g.look(p)
		reply(w, info, nil)
	case !ok:
		reply(w, nil, noFile(p))
	case q.Method == http.MethodDelete:
		for _, below := range append(g.below(p), p) {
			delete(g.files, below)
			delete(g.about, below)
			g.notify("remove", below)
		}
		reply(w, nil, nil)
	case query.Get("tar") != "":
		w.Header().Set("Content-Type", "application/x-tar")
		_ = g.tar(w, p, g.below(p)) // the reader may have gone
	case query.Get("stat") != "":
		reply(w, info, nil)
	case query.Get("list") != "":
		reply(w, g.list(p, query.Get("depth")), nil)
	default:
		header, _ := json.Marshal(info)
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Coppice-File", string(header))
		w.Header().Set("Content-Length", strconv.Itoa(len(g.files[p])))
		if q.Method == http.MethodGet {
			_, _ = w.Write(g.files[p]) // the reader may have gone
		}
	}
}

// list lists a directory. The caller holds mu.
func (g *guest) list(dir, depth string) any {
	levels, _ := strconv.Atoi(depth)
	entries := []controller.GuestFile{}
	for _, p := range g.below(dir) {
		if strings.Count(strings.TrimPrefix(p, strings.TrimSuffix(dir, "/")), "/") <= max(levels, 1) {
			info, _ := g.look(p)
			entries = append(entries, info)
		}
	}
	return map[string]any{"path": dir, "entries": entries, "truncated": false}
}

// written returns the bytes of a file after a write.
func written(old, body []byte, inPlace, end bool, offset string) []byte {
	at, err := strconv.Atoi(offset)
	switch {
	case inPlace && end:
		return slices.Concat(old, body)
	case inPlace && err == nil:
		out := slices.Concat(old, make([]byte, max(0, at+len(body)-len(old))))
		copy(out[at:], body)
		return out
	}
	return body
}

// read decodes the request of a change, or answers it.
func read[T any](w http.ResponseWriter, q *http.Request) (in T, ok bool) {
	if err := json.NewDecoder(q.Body).Decode(&in); err != nil {
		reply(w, nil, core.Wrapf(err, core.Invalid, core.CodeMalformedBody, "cannot be read"))
		return in, false
	}
	return in, true
}

func (g *guest) makeDir(w http.ResponseWriter, q *http.Request) {
	in, ok := read[controller.MakeDirectory](w, q)
	if !ok {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	p := home(in.Path, in.User)
	_, exists := g.look(p)
	if exists && !in.Parents {
		reply(w, nil, core.Errorf(core.Conflict, "FILE_CONFLICT", "%s exists", p))
		return
	}
	for dir := p; !exists && dir != "/"; dir = path.Dir(dir) {
		g.about[dir] = about{dir: true, owner: in.User}
		g.notify("create", dir)
	}
	out := controller.MadeDirectory{Created: !exists}
	out.File, _ = g.look(p)
	reply(w, out, nil)
}

func (g *guest) rename(w http.ResponseWriter, q *http.Request) {
	in, ok := read[controller.RenameFile](w, q)
	if !ok {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	from, to := home(in.From, in.User), home(in.To, in.User)
	if _, ok := g.look(from); !ok {
		reply(w, nil, noFile(from))
		return
	}
	if _, ok := g.look(to); ok && in.NoReplace {
		reply(w, nil, core.Errorf(core.Conflict, "FILE_CONFLICT", "%s exists", to))
		return
	}
	for _, p := range append(g.below(from), from) {
		moved := to + strings.TrimPrefix(p, from)
		if b, ok := g.files[p]; ok {
			g.files[moved] = b
		}
		g.about[moved] = g.about[p]
		delete(g.files, p)
		delete(g.about, p)
	}
	g.notify("rename", from)
	g.notify("create", to)
	info, _ := g.look(to)
	reply(w, info, nil)
}

func (g *guest) setAttributes(w http.ResponseWriter, q *http.Request) {
	in, ok := read[controller.SetFileAttributes](w, q)
	if !ok {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	p := home(in.Path, in.User)
	if _, ok := g.look(p); !ok {
		reply(w, nil, noFile(p))
		return
	}
	a := g.about[p]
	xattrs := map[string]string{}
	maps.Copy(xattrs, a.xattrs)
	maps.Copy(xattrs, in.Set)
	for _, name := range in.Remove {
		delete(xattrs, name)
	}
	a.xattrs = xattrs
	g.about[p] = a
	info, _ := g.look(p)
	reply(w, info, nil)
}

// tar writes the files under a directory, or one file. g.mu is held.
func (g *guest) tar(w io.Writer, top string, below []string) error {
	if _, ok := g.files[top]; ok {
		below = []string{top}
	}
	tw := tar.NewWriter(w)
	for _, f := range below {
		if _, ok := g.files[f]; !ok {
			continue
		}
		name := path.Join(path.Base(top), strings.TrimPrefix(f, strings.TrimSuffix(top, "/")))
		h := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(g.files[f])), Format: tar.FormatPAX}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if _, err := tw.Write(g.files[f]); err != nil {
			return err
		}
	}
	return tw.Close()
}

// untar keeps the regular files of an archive. g.mu is held.
func (g *guest) untar(dir string, archive []byte) error {
	for tr := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		b, err := io.ReadAll(tr)
		if err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
		g.files[path.Join(dir, h.Name)] = b //nolint:gosec // G305: a name in memory
	}
}
