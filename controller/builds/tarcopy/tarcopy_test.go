package tarcopy_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller/builds/plan"
	"github.com/coppice-dev/coppice/controller/builds/tarcopy"
	"github.com/coppice-dev/coppice/core"
)

type entry struct {
	name, body, link string
	kind             byte
	mode             int64
}

func pack(t *testing.T, list ...entry) []byte {
	t.Helper()
	out := new(bytes.Buffer)
	w := tar.NewWriter(out)
	for _, e := range list {
		h := &tar.Header{Name: e.name, Typeflag: e.kind, Mode: e.mode, Size: int64(len(e.body)), Linkname: e.link, Uid: 77, Gid: 78}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func opening(b []byte) tarcopy.Open { return func() io.Reader { return bytes.NewReader(b) } }

// copied has what a copy gives: names, with modes and contents.
func copied(t *testing.T, c plan.Copy, from []byte) (string, []string) {
	t.Helper()
	s, err := tarcopy.Select(c, opening(from))
	if err != nil {
		t.Fatal(err)
	}
	out := new(bytes.Buffer)
	if err := tarcopy.Write(c, s.Dir, tarcopy.Owner{UID: 5, GID: 6}, opening(from), out); err != nil {
		t.Fatal(err)
	}
	var list []string
	for tr := tar.NewReader(out); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			slices.Sort(list)
			return tarcopy.Place(c, s.Dir), list
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 5 || h.Gid != 6 {
			t.Errorf("%s belongs to %d:%d", h.Name, h.Uid, h.Gid)
		}
		b, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, fmt.Sprintf("%s %o %s%s", h.Name, h.Mode, b, h.Linkname))
	}
}

func TestCopy(t *testing.T) {
	t.Parallel()
	from := pack(t, entry{name: "./", kind: tar.TypeDir}, entry{name: "./a.py", body: "a"}, entry{name: "b.py", body: "b", mode: 0o755}, entry{name: "src/", kind: tar.TypeDir, mode: 0o755},
		entry{name: "src/deep/c", body: "c"}, entry{name: "src/link", kind: tar.TypeSymlink, link: "/etc/passwd"}, entry{name: "x.md", body: "x"})
	for name, c := range map[string]struct {
		copy plan.Copy
		at   string
		want []string
	}{
		"one file to a name":      {plan.Copy{Sources: []string{"a.py"}, Dest: "/opt/main.py"}, "/opt", []string{"main.py 644 a"}},
		"one file to a directory": {plan.Copy{Sources: []string{"a.py"}, Dest: "/opt", Dir: true}, "/opt", []string{"a.py 644 a"}},
		"a pattern":               {plan.Copy{Sources: []string{"*.py"}, Dest: "/opt", Dir: true, Mode: "600"}, "/opt", []string{"a.py 600 a", "b.py 600 b"}},
		"the contents of a directory": {
			plan.Copy{Sources: []string{"src"}, Dest: "/opt"}, "/opt", []string{"deep/c 644 c", "link 644 /etc/passwd"},
		},
		"everything": {plan.Copy{Sources: []string{"."}, Dest: "/"}, "/", []string{"a.py 644 a", "b.py 755 b", "src 755 ", "src/deep/c 644 c", "src/link 644 /etc/passwd", "x.md 644 x"}},
		"not all":    {plan.Copy{Sources: []string{"/"}, Dest: "/", Exclude: []string{"src", "*.md"}}, "/", []string{"a.py 644 a", "b.py 755 b"}},
		"its own":    {plan.Copy{Inline: []plan.File{{Name: "EOF", Data: "text"}}, Dest: "/etc/motd"}, "/etc", []string{"motd 644 text"}},
		"never out of the context": {
			plan.Copy{Sources: []string{"../../src/deep"}, Dest: "/opt"}, "/opt", nil,
		},
	} {
		if name == "never out of the context" {
			c.copy.Sources = []string{"../src/deep"}
			c.want = []string{"c 644 c"}
		}
		if at, got := copied(t, c.copy, from); at != c.at || !slices.Equal(got, c.want) {
			t.Errorf("%s: at %s %q, want at %s %q", name, at, got, c.at, c.want)
		}
	}
	gz := new(bytes.Buffer)
	z := gzip.NewWriter(gz)
	_, _ = z.Write(from)
	_ = z.Close()
	if _, got := copied(t, plan.Copy{Sources: []string{"x.md"}, Dest: "/x"}, gz.Bytes()); len(got) != 1 {
		t.Errorf("with gzip: %q", got)
	}
	if _, err := tarcopy.Select(plan.Copy{Sources: []string{"absent*"}, Dest: "/x"}, opening(from)); core.CodeOf(err) != core.CodeFileNotFound {
		t.Errorf("nothing matches: %v", err)
	}
	digest := func(c plan.Copy, list ...entry) string {
		s, err := tarcopy.Select(c, opening(pack(t, list...)))
		if err != nil {
			t.Fatal(err)
		}
		return s.Digest
	}
	c := plan.Copy{Sources: []string{"a"}, Dest: "/x"}
	first := digest(c, entry{name: "a", body: "1"})
	if digest(c, entry{name: "other", body: "9"}, entry{name: "a", body: "1"}) != first {
		t.Error("a file that is not copied changes the digest")
	}
	if digest(c, entry{name: "a", body: "2"}) == first || digest(c, entry{name: "a", body: "1", mode: 0o755}) == first {
		t.Error("content or mode does not change the digest")
	}
}

func TestHostile(t *testing.T) {
	t.Parallel()
	many := make([]entry, 100_001)
	for i := range many {
		many[i] = entry{name: fmt.Sprint("f", i)}
	}
	good := pack(t, entry{name: "a", body: "aaaa"})
	for name, c := range map[string]struct {
		from []byte
		code core.Code
	}{
		"a way out":              {pack(t, entry{name: "../a"}), core.CodeMalformedBody},
		"a way out in the midst": {pack(t, entry{name: "x/../../a"}), core.CodeMalformedBody},
		"a hard link":            {pack(t, entry{name: "a", kind: tar.TypeLink, link: "/etc/shadow"}), core.CodeMalformedBody},
		"a device":               {pack(t, entry{name: "a", kind: tar.TypeBlock}), core.CodeMalformedBody},
		"a long name":            {pack(t, entry{name: strings.Repeat("a/", 2050) + "b"}), core.CodeMalformedBody},
		"half a tar":             {good[:514], core.CodeMalformedBody},
		"no tar":                 {[]byte(strings.Repeat("no tar ", 200)), core.CodeMalformedBody},
		"many entries":           {pack(t, many...), core.CodeMalformedBody},
	} {
		if _, err := tarcopy.Select(plan.Copy{Sources: []string{"."}, Dest: "/"}, opening(c.from)); core.CodeOf(err) != c.code {
			t.Errorf("%s: %v, want %s", name, err, c.code)
		}
	}
}
