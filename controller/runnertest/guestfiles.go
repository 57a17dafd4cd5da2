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

	"github.com/coppice-dev/coppice/core"
)

// serveFile answers the routes of files. A directory is there if it was made, or while a file in it is.
func (g *guest) serveFile(w http.ResponseWriter, q *http.Request) {
	name := q.URL.Query().Get("path")
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
	b, ok := g.files[name]
	below := g.below(name)
	if q.Method != http.MethodPut && !ok && len(below) == 0 && !g.dirs[name] {
		reply(w, nil, core.Errorf(core.NotFound, core.CodeFileNotFound, "%s: no such file", name))
		return
	}
	asked := func(flag string) bool { return q.URL.Query().Get(flag) != "" }
	switch {
	case q.Method == http.MethodPut && asked("untar"):
		if err := g.untar(name, body); err != nil {
			reply(w, nil, core.Errorf(core.Invalid, core.CodeMalformedBody, "untar: %v", err))
			return
		}
		reply(w, g.fileInfo(name), nil)
	case q.Method == http.MethodPut:
		g.files[name] = body
		reply(w, g.fileInfo(name), nil)
	case q.Method == http.MethodDelete:
		delete(g.files, name)
		delete(g.dirs, name)
		for _, f := range below {
			delete(g.files, f)
		}
		reply(w, nil, nil)
	case asked("stat"):
		reply(w, g.fileInfo(name), nil)
	case asked("list"):
		reply(w, g.list(name, below), nil)
	case asked("tar"):
		w.Header().Set("Content-Type", "application/x-tar")
		_ = g.tar(w, name, below) // the reader may have gone
	default:
		info, _ := json.Marshal(g.fileInfo(name))
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Coppice-File", string(info))
		w.Header().Set("Content-Length", strconv.Itoa(len(b)))
		if q.Method == http.MethodGet {
			_, _ = w.Write(b)
		}
	}
}

// below returns the names of the files under a directory. g.mu is held.
func (g *guest) below(dir string) []string {
	prefix := strings.TrimSuffix(dir, "/") + "/"
	return slices.DeleteFunc(slices.Sorted(maps.Keys(g.files)), func(name string) bool { return !strings.HasPrefix(name, prefix) })
}

// fileInfo describes a path. g.mu is held.
func (g *guest) fileInfo(name string) map[string]any {
	b, ok := g.files[name]
	kind, mode := "file", "0644"
	if !ok {
		kind, mode = "dir", "0755"
	}
	return map[string]any{"path": name, "name": path.Base(name), "type": kind, "size": len(b), "mode": mode, "uid": 0, "gid": 0, "mtime": time.Now().UTC()}
}

// list describes the entries of a directory. g.mu is held.
func (g *guest) list(dir string, below []string) map[string]any {
	prefix, found := strings.TrimSuffix(dir, "/")+"/", map[string]bool{}
	for _, f := range slices.Concat(below, slices.Collect(maps.Keys(g.dirs))) {
		if rest, ok := strings.CutPrefix(f, prefix); ok && rest != "" {
			first, _, _ := strings.Cut(rest, "/")
			found[first] = true
		}
	}
	entries := []map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(found)) {
		entries = append(entries, g.fileInfo(path.Join(dir, name)))
	}
	return map[string]any{"path": dir, "entries": entries, "truncated": false}
}

// tar writes the files under a directory, or one file. g.mu is held.
func (g *guest) tar(w io.Writer, top string, below []string) error {
	if _, ok := g.files[top]; ok {
		below = []string{top}
	}
	tw := tar.NewWriter(w)
	for _, f := range below {
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
		g.files[path.Join(dir, h.Name)] = b
	}
}
