package coppice_test

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// guest serves the files below a directory as if it were the root of a machine.
type guest struct {
	t      *testing.T
	root   *os.Root
	status string // of a tar, instead of "ok"
	extra  []tar.Header
	to     string // if set, the only workspace that is written, and one that is not read
}

func newGuest(t *testing.T) (*guest, *coppice.Client) {
	t.Helper()
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	g := &guest{t: t, root: root, status: "ok"}
	return g, serve(t, g)
}

func (g *guest) info(name string) (api.FileInfo, error) {
	fi, err := g.root.Stat(name)
	if err != nil {
		return api.FileInfo{}, err
	}
	kind := api.FileTypeFile
	if fi.IsDir() {
		kind = api.FileTypeDir
	}
	return api.FileInfo{Path: "/" + name, Name: fi.Name(), Type: kind, Size: fi.Size(), Mode: fmt.Sprintf("%04o", fi.Mode().Perm())}, nil
}

func (g *guest) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	name := strings.TrimPrefix(filepath.Clean(q.Get("path")), "/")
	if name == "" {
		name = "."
	}
	info, err := g.info(name)
	if r.Method == http.MethodPut {
		g.put(w, r, name)
		return
	}
	if err != nil {
		problem(w, api.Problem{Status: 404, Code: "FILE_NOT_FOUND", Detail: name})
		return
	}
	if g.to != "" && strings.Contains(r.URL.Path, "/"+g.to+"/") && q.Get("stat") != "true" && !strings.HasSuffix(r.URL.Path, "/pass") {
		g.t.Errorf("%s was read", r.URL.Path)
	}
	switch {
	case r.Method == http.MethodDelete:
		if q.Get("recursive") == "true" {
			_ = g.root.RemoveAll(name)
		} else {
			_ = g.root.Remove(name)
		}
		w.WriteHeader(http.StatusNoContent)
	case q.Get("stat") == "true":
		_ = json.NewEncoder(w).Encode(info)
	case q.Get("list") == "true":
		_ = json.NewEncoder(w).Encode(api.FileList{Path: info.Path, Entries: []api.FileInfo{info}})
	case q.Get("tar") == "true":
		g.tar(w, name)
	default:
		b, _ := json.Marshal(info)
		w.Header().Set("Coppice-File", string(b))
		f, _ := g.root.Open(name)
		_, _ = io.Copy(w, f)
		_ = f.Close()
	}
}

func (g *guest) put(w http.ResponseWriter, r *http.Request, name string) {
	if g.to != "" && !strings.Contains(r.URL.Path, "/"+g.to+"/") {
		g.t.Errorf("%s was written", r.URL.Path)
	}
	if r.URL.Query().Get("untar") != "true" {
		f, err := g.root.Create(name)
		if err != nil {
			problem(w, api.Problem{Status: 404, Code: "FILE_NOT_FOUND", Detail: err.Error()})
			return
		}
		_, _ = io.Copy(f, r.Body)
		_ = f.Close()
		_ = json.NewEncoder(w).Encode(api.FileInfo{Path: "/" + name, Mode: r.URL.Query().Get("mode")})
		return
	}
	_ = g.root.Mkdir(name, 0o755)
	for tr := tar.NewReader(r.Body); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			problem(w, api.Problem{Status: 400, Code: "MALFORMED_BODY", Detail: err.Error()})
			return
		}
		if h.Uid != 0 || h.Uname != "" {
			g.t.Errorf("%s: owner %d %q", h.Name, h.Uid, h.Uname)
		}
		p := filepath.Join(name, h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			_ = g.root.MkdirAll(p, 0o755)
		case tar.TypeSymlink:
			_ = g.root.Symlink(h.Linkname, p)
		default:
			f, err := g.root.OpenFile(p, os.O_CREATE|os.O_WRONLY, h.FileInfo().Mode())
			if err != nil {
				g.t.Error(err)
				return
			}
			_, _ = io.Copy(f, tr)
			_ = f.Close()
		}
	}
	_ = json.NewEncoder(w).Encode(api.FileInfo{Path: "/" + name, Type: api.FileTypeDir})
}

// tar does the same as the agent: names begin with the last element of the path, or have no such element for the root.
func (g *guest) tar(w http.ResponseWriter, name string) {
	w.Header().Set("Trailer", "Coppice-Status")
	tw := tar.NewWriter(w)
	base := filepath.Base(name)
	_ = fs.WalkDir(g.root.FS(), name, func(p string, d fs.DirEntry, _ error) error {
		rel, _ := filepath.Rel(name, p)
		info, _ := d.Info()
		target := ""
		if info.Mode()&fs.ModeSymlink != 0 {
			target, _ = g.root.Readlink(p)
		}
		h, _ := tar.FileInfoHeader(info, target)
		h.Name = filepath.Join(base, rel)
		_ = tw.WriteHeader(h)
		if info.Mode().IsRegular() {
			f, _ := g.root.Open(p)
			_, _ = io.Copy(tw, f)
			_ = f.Close()
		}
		return nil
	})
	for _, h := range g.extra {
		_ = tw.WriteHeader(&h)
	}
	_ = tw.Close()
	w.Header().Set("Coppice-Status", g.status)
}

// tree makes files below a directory: name to content; "-> x" is a symbolic link, a trailing slash a directory.
func tree(t *testing.T, dir string, files map[string]string) string {
	t.Helper()
	for name, content := range files {
		p := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(p), 0o755)
		target, link := strings.CutPrefix(content, "-> ")
		switch {
		case err != nil:
		case strings.HasSuffix(name, "/"):
			err = os.Mkdir(p, 0o755)
		case link:
			err = os.Symlink(target, p)
		default:
			err = os.WriteFile(p, []byte(content), 0o640)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// list reads a tree back.
func list(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		switch {
		case d.Type()&fs.ModeSymlink != 0:
			target, err := os.Readlink(p)
			out[rel] = "-> " + target
			return err
		case d.Type().IsRegular():
			b, err := os.ReadFile(p)
			out[rel] = string(b)
			return err
		case rel != ".":
			if entries, _ := os.ReadDir(p); len(entries) == 0 {
				out[rel+"/"] = ""
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

var sample = map[string]string{"a": "1", "d/b": "22", "d/l": "-> ../a", "e/": ""}

func TestCopyTo(t *testing.T) {
	t.Parallel()
	under := func(prefix string) map[string]string {
		out := map[string]string{}
		for k, v := range sample {
			out[prefix+k] = v
		}
		return out
	}
	for _, x := range []struct {
		name, local, remote string
		before, want        map[string]string
		fail                string
	}{
		{name: "directory to a new name", local: "src", remote: "/new", want: under("new/")},
		{name: "directory into a directory", local: "src", remote: "/old", before: map[string]string{"old/": ""}, want: under("old/src/")},
		{name: "what a directory holds", local: "src/.", remote: "/old", before: map[string]string{"old/": ""}, want: under("old/")},
		{name: "file to a new name", local: "src/a", remote: "/b", want: map[string]string{"b": "1"}},
		{name: "file into a directory", local: "src/a", remote: "/old", before: map[string]string{"old/": ""}, want: map[string]string{"old/a": "1"}},
		{name: "file over a file", local: "src/a", remote: "/f", before: map[string]string{"f": "old"}, want: map[string]string{"f": "1"}},
		{name: "file to a directory that is not there", local: "src/a", remote: "/x/", fail: "no such directory"},
		{name: "directory over a file", local: "src", remote: "/f", before: map[string]string{"f": ""}, fail: "not a directory"},
		{name: "nothing", local: "gone", remote: "/f", fail: "no such file"},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			g, c := newGuest(t)
			tree(t, g.root.Name(), x.before)
			dir := t.TempDir()
			tree(t, filepath.Join(dir, "src"), sample)
			_, err := c.CopyTo(t.Context(), "ws_1", dir+"/"+x.local, x.remote)
			if x.fail != "" {
				if err == nil || !strings.Contains(err.Error(), x.fail) {
					t.Errorf("got %v, want %q", err, x.fail)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(x.want, list(t, g.root.Name())); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestCopyFrom(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		name, remote, local string
		before, want        map[string]string
		fail                string
	}{
		{name: "directory to a new name", remote: "/src/d", local: "new", want: map[string]string{"new/b": "22"}},
		{name: "directory into a directory", remote: "/src/d", local: ".", want: map[string]string{"d/b": "22"}},
		{name: "what a directory holds", remote: "/src/d/.", local: ".", want: map[string]string{"b": "22"}},
		{name: "the root", remote: "/", local: ".", want: map[string]string{"src/a": "1", "src/d/b": "22", "src/d/l": "-> ../a", "src/e/": ""}},
		{name: "file into a directory", remote: "/src/a", local: ".", want: map[string]string{"a": "1"}},
		{name: "file to a new name", remote: "/src/a", local: "x", want: map[string]string{"x": "1"}},
		{name: "over what is there", remote: "/src/d/.", local: ".", before: map[string]string{"b": "older"}, want: map[string]string{"b": "22"}},
		{name: "directory over a file", remote: "/src/d", local: "f", before: map[string]string{"f": ""}, fail: "not a directory"},
		{name: "nothing", remote: "/gone", local: ".", fail: "FILE_NOT_FOUND"},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			g, c := newGuest(t)
			tree(t, filepath.Join(g.root.Name(), "src"), sample)
			dir := tree(t, t.TempDir(), x.before)
			_, err := c.CopyFrom(t.Context(), "ws_1", x.remote, dir+"/"+x.local)
			if x.fail != "" {
				if err == nil || !strings.Contains(err.Error(), x.fail) {
					t.Errorf("got %v, want %q", err, x.fail)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(x.want, list(t, dir)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestCopyFromStaysInside(t *testing.T) {
	t.Parallel()
	g, c := newGuest(t)
	tree(t, g.root.Name(), map[string]string{"src/ok": "1"})
	outside := t.TempDir()
	g.extra = []tar.Header{
		{Name: "src/out", Typeflag: tar.TypeSymlink, Linkname: outside},
		{Name: "src/out/planted", Typeflag: tar.TypeReg, Mode: 0o644},
	}
	dir := t.TempDir()
	if _, err := c.CopyFrom(t.Context(), "ws_1", "/src", dir); err != nil {
		t.Error(err)
	}
	if got := list(t, dir); got["src/out/planted"] != "" || len(got) != 2 {
		t.Errorf("a link that leads outside and a file through it: %v", got)
	}
	g.extra = []tar.Header{{Name: "src/../../../etc/planted", Typeflag: tar.TypeReg, Mode: 0o644, ModTime: time.Unix(1, 0)}}
	if _, err := c.CopyFrom(t.Context(), "ws_1", "/src", t.TempDir()); err != nil {
		t.Log(err)
	}
	if got := list(t, outside); len(got) > 0 {
		t.Errorf("written outside: %v", got)
	}
	g.extra, g.status = nil, "permission denied"
	if _, err := c.CopyFrom(t.Context(), "ws_1", "/src", t.TempDir()); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("a tar that the guest could not finish: %v", err)
	}
}

func TestFiles(t *testing.T) {
	t.Parallel()
	_, c := newGuest(t)
	ctx := t.Context()
	if _, err := c.WriteFile(ctx, "ws_1", "/f", strings.NewReader("hello"), coppice.WriteOptions{Mode: "0600", UID: new(5), GID: new(6), Mkdirs: true}); err != nil {
		t.Fatal(err)
	}
	b, err := c.ReadFile(ctx, "ws_1", "/f", 5)
	if err != nil || string(b) != "hello" {
		t.Errorf("got %q, %v", b, err)
	}
	if _, err := c.ReadFile(ctx, "ws_1", "/f", 4); err == nil {
		t.Error("a file above the limit was read")
	}
	if l, err := c.ListFiles(ctx, "ws_1", "/f"); err != nil || len(l.Entries) != 1 {
		t.Errorf("got %+v, %v", l, err)
	}
	if err := c.RemoveFile(ctx, "ws_1", "/f", false); err != nil {
		t.Error(err)
	}
	if _, err := c.StatFile(ctx, "ws_1", "/f"); !errors.Is(err, coppice.CodeFileNotFound) {
		t.Errorf("got %v", err)
	}
	if err := c.RemoveFile(ctx, "ws_1", "/f", true); !errors.Is(err, coppice.CodeFileNotFound) {
		t.Errorf("got %v", err)
	}
}
