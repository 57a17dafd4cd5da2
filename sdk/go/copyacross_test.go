package coppice_test

import (
	"archive/tar"
	"io/fs"
	"path"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// found lists what is in a guest, with the content of files and the targets of links.
func (g *guest) found(t *testing.T) []string {
	t.Helper()
	var out []string
	err := fs.WalkDir(g.root.FS(), ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		line := p + " "
		if d.Type()&fs.ModeSymlink != 0 {
			target, err := g.root.Readlink(p)
			out = append(out, line+"-> "+target)
			return err
		}
		b, err := fs.ReadFile(g.root.FS(), p)
		out = append(out, line+string(b))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestCopyAcross copies within one guest, which is what a copy between two is: the rules are those of cp -r, and the source has no say about
// where things go.
func TestCopyAcross(t *testing.T) {
	t.Parallel()
	for name, x := range map[string]struct {
		from, to string
		extra    []tar.Header
		options  coppice.CopyOptions
		want     []string // besides what was there
		leftOut  int
		err      string
	}{
		"a file":                      {from: "/src/f", to: "/g", want: []string{"g file"}},
		"a file into a directory":     {from: "/src/f", to: "/dst", want: []string{"dst/f file"}},
		"a file to a missing one":     {from: "/src/f", to: "/missing/", err: "no such directory"},
		"a tree":                      {from: "/src", to: "/copy", want: []string{"copy/d/e deep", "copy/f file", "copy/in -> d/e"}},
		"a tree into a directory":     {from: "/src", to: "/dst", want: []string{"dst/src/d/e deep", "dst/src/f file", "dst/src/in -> d/e"}},
		"the content of a tree":       {from: "/src/.", to: "/dst", want: []string{"dst/d/e deep", "dst/f file", "dst/in -> d/e"}},
		"a tree to a file":            {from: "/src", to: "/dst/old", err: "not a directory"},
		"a file that is not there":    {from: "/absent", to: "/g", err: "FILE_NOT_FOUND"},
		"too many entries":            {from: "/src", to: "/copy", options: coppice.CopyOptions{MaxEntries: 2}, err: "more than 2 entries"},
		"too many bytes":              {from: "/src", to: "/copy", options: coppice.CopyOptions{MaxBytes: 5}, err: "exceeds the bound"},
		"links that lead out":         {from: "/src/.", to: "/dst", extra: []tar.Header{{Typeflag: tar.TypeSymlink, Name: "src/out", Linkname: "/etc"}, {Typeflag: tar.TypeLink, Name: "src/hard", Linkname: "/etc/passwd"}}, want: []string{"dst/d/e deep", "dst/f file", "dst/in -> d/e"}, leftOut: 2},
		"links that lead out, wanted": {from: "/src/.", to: "/dst", extra: []tar.Header{{Typeflag: tar.TypeSymlink, Name: "src/out", Linkname: "/etc"}}, options: coppice.CopyOptions{OutsideLinks: true}, want: []string{"dst/d/e deep", "dst/f file", "dst/in -> d/e", "dst/out -> /etc"}},
		"names that lead out":         {from: "/src/.", to: "/dst", extra: []tar.Header{{Typeflag: tar.TypeReg, Name: "src/../../evil", Mode: 0o644}}, want: []string{"dst/d/e deep", "dst/evil ", "dst/f file", "dst/in -> d/e"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g, client := newGuest(t)
			g.extra, g.to = x.extra, "ws_b"
			for p, content := range map[string]string{"src/f": "file", "src/d/e": "deep", "dst/old": "old"} {
				if err := g.root.MkdirAll(path.Dir(p), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := g.root.WriteFile(p, []byte(content), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if err := g.root.Symlink("d/e", "src/in"); err != nil {
				t.Fatal(err)
			}
			before := map[string]bool{}
			for _, line := range g.found(t) {
				before[line] = true
			}
			got, err := client.CopyAcross(t.Context(), "ws_a", x.from, "ws_b", x.to, x.options)
			if x.err != "" {
				if err == nil || !strings.Contains(err.Error(), x.err) {
					t.Errorf("%+v, %v, want %q", got, err, x.err)
				}
				return
			}
			var added []string
			for _, line := range g.found(t) {
				if !before[line] {
					added = append(added, line)
				}
			}
			if diff := cmp.Diff(x.want, added); diff != "" || err != nil || got.LeftOut != x.leftOut {
				t.Errorf("%+v, %v: %s", got, err, diff)
			}
		})
	}
}
