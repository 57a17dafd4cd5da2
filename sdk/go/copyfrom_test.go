package coppice_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestCopyTwice copies twice from a hostile guest: the first copy plants something, and the second one tries to write
// through it. OUT stands for a directory that the guest must not reach.
func TestCopyTwice(t *testing.T) {
	t.Parallel()
	link := func(name, target string) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target}
	}
	file := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o6755} }
	dir := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o777} }
	hard := func(name, target string) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: target}
	}
	for name, x := range map[string]struct {
		plant          []tar.Header // content of the first copy, from /src/. to .
		remote, local  string       // arguments of the second copy
		then           []tar.Header
		outsideLinksOK bool // keep links that lead outside in the first copy
	}{
		"link to a file":                    {plant: []tar.Header{link("src/a", "OUT/rc")}, remote: "/src/a", local: "."},
		"link to a file, by name":           {plant: []tar.Header{link("src/a", "OUT/rc")}, remote: "/src/a", local: "a"},
		"the same, links kept":              {plant: []tar.Header{link("src/a", "OUT/rc")}, remote: "/src/a", local: "a", outsideLinksOK: true},
		"relative link to a file":           {plant: []tar.Header{link("src/a", "../OUTNAME/rc")}, remote: "/src/a", local: "."},
		"link to a directory":               {plant: []tar.Header{link("src/d", "OUT")}, remote: "/src/d", local: ".", then: []tar.Header{file("d/rc")}},
		"the same, into it, links kept":     {plant: []tar.Header{link("src/d", "OUT")}, remote: "/src/d", local: ".", then: []tar.Header{file("d/rc")}, outsideLinksOK: true},
		"link to a directory, by name":      {plant: []tar.Header{link("src/d", "OUT")}, remote: "/src/d/.", local: "d", then: []tar.Header{file("d/rc")}},
		"link to a directory, slash":        {plant: []tar.Header{link("src/d/", "OUT/")}, remote: "/src/a", local: "d/"},
		"file below a link":                 {plant: []tar.Header{link("src/d", "OUT")}, remote: "/src/a", local: "d/rc"},
		"dots":                              {plant: []tar.Header{file("src/../../OUTNAME/rc"), file("../OUTNAME/rc"), file("/../OUTNAME/rc")}, remote: "/src/a", local: "."},
		"dots behind a link":                {plant: []tar.Header{dir("src/p"), dir("src/p/q"), link("src/p/q/l", "../.."), link("src/p/q/o", "l/../OUTNAME")}, remote: "/src/a", local: "p/q/o/rc"},
		"hard link to outside":              {plant: []tar.Header{hard("src/h", "OUT/rc"), hard("src/h", "../OUTNAME/rc"), link("src/s", "OUT"), hard("src/h", "src/s/rc")}, remote: "/src/a", local: "h"},
		"hard link through a link":          {plant: []tar.Header{link("src/s", "OUT")}, remote: "/src/.", local: ".", then: []tar.Header{hard("src/h", "src/s/rc"), file("src/h")}, outsideLinksOK: true},
		"hard link to a link":               {plant: []tar.Header{link("src/s", "OUT/rc")}, remote: "/src/.", local: ".", then: []tar.Header{hard("src/h", "src/s"), file("src/h")}, outsideLinksOK: true},
		"directory replaced by a link":      {plant: []tar.Header{dir("src/d"), link("src/d", "OUT"), file("src/d/rc")}, remote: "/src/.", local: ".", then: []tar.Header{file("src/d/rc")}, outsideLinksOK: true},
		"link replaced by a directory":      {plant: []tar.Header{link("src/d", "OUT")}, remote: "/src/.", local: ".", then: []tar.Header{dir("src/d"), file("src/d/rc")}, outsideLinksOK: true},
		"mode of a link that was one":       {plant: []tar.Header{dir("src/d")}, remote: "/src/.", local: ".", then: []tar.Header{dir("src/d/e"), link("src/d/e", "OUT")}, outsideLinksOK: true},
		"another case":                      {plant: []tar.Header{link("src/D", "OUT"), file("src/d/rc")}, remote: "/src/.", local: ".", then: []tar.Header{file("src/D/rc"), file("src/d/rc")}, outsideLinksOK: true},
		"devices and pipes":                 {plant: []tar.Header{{Name: "src/a2", Typeflag: tar.TypeFifo}, {Name: "src/a3", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}, {Name: "src/a4", Typeflag: tar.TypeBlock}}, remote: "/src/a", local: "."},
		"link in the middle, kept":          {plant: []tar.Header{dir("src/p"), link("src/p/q", "OUT")}, remote: "/src/.", local: ".", then: []tar.Header{file("src/p/q/rc"), file("src/p/q/deep/rc")}, outsideLinksOK: true},
		"link to itself and to nothing":     {plant: []tar.Header{link("src/d", "d"), link("src/e", "nothing")}, remote: "/src/.", local: ".", then: []tar.Header{file("src/d/x"), file("src/e/x")}},
		"names that are only dots or empty": {plant: []tar.Header{file("src/."), file("src/.."), file("/"), file("src//")}, remote: "/src/a", local: "."},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g, c := newGuest(t)
			tree(t, g.root.Name(), map[string]string{"src/a": "evil", "src/d/rc": "evil"})
			top := t.TempDir()
			outside := tree(t, filepath.Join(top, "outside"), map[string]string{"rc": "mine"})
			if err := os.Chmod(outside, 0o751); err != nil {
				t.Fatal(err)
			}
			target := filepath.Join(top, "target")
			if err := os.Mkdir(target, 0o755); err != nil {
				t.Fatal(err)
			}
			fill := func(list []tar.Header) []tar.Header {
				out := make([]tar.Header, len(list))
				for i, h := range list {
					h.Linkname = strings.NewReplacer("OUTNAME", "outside", "OUT", outside).Replace(h.Linkname)
					h.Name = strings.ReplaceAll(h.Name, "OUTNAME", "outside")
					out[i] = h
				}
				return out
			}
			o := coppice.CopyOptions{OutsideLinks: x.outsideLinksOK}
			g.extra = fill(x.plant)
			_, first := c.CopyFromWith(t.Context(), "ws_1", "/src/.", target, o)
			g.extra = fill(x.then)
			_, second := c.CopyFromWith(t.Context(), "ws_1", x.remote, target+"/"+x.local, o)
			t.Logf("first: %v, second: %v", first, second)
			got := list(t, outside)
			info, err := os.Stat(outside)
			if len(got) != 1 || got["rc"] != "mine" || err != nil || info.Mode().Perm() != 0o751 {
				t.Errorf("outside: %v, %v, %v", got, info.Mode(), err)
			}
			if err := filepath.WalkDir(target, func(p string, d fs.DirEntry, err error) error {
				info, infoErr := d.Info()
				if err == nil && infoErr == nil && info.Mode()&(fs.ModeSetuid|fs.ModeSetgid|fs.ModeDevice|fs.ModeNamedPipe) != 0 {
					t.Errorf("%s is %s", p, info.Mode())
				}
				return errors.Join(err, infoErr)
			}); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestCopyToLinks: a link that the user made and named is followed if it leads to a directory.
func TestCopyToLinks(t *testing.T) {
	t.Parallel()
	g, c := newGuest(t)
	tree(t, g.root.Name(), map[string]string{"src/a": "1", "src/d/b": "22"})
	dir := tree(t, t.TempDir(), map[string]string{"real/x": "0", "way": "-> real", "f": "mine", "name": "-> f"})
	for _, x := range []struct{ remote, local string }{{"/src/a", "way"}, {"/src/d", "way/"}, {"/src/a", "way/c"}, {"/src/a", "name"}} {
		if _, err := c.CopyFrom(t.Context(), "ws_1", x.remote, dir+"/"+x.local); err != nil {
			t.Errorf("%s to %s: %v", x.remote, x.local, err)
		}
	}
	got := list(t, dir)
	for name, want := range map[string]string{"real/a": "1", "real/c": "1", "real/d/b": "22", "real/x": "0", "f": "mine", "name": "1", "way": "-> real"} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
}

func TestCopyBounds(t *testing.T) {
	t.Parallel()
	g, c := newGuest(t)
	tree(t, g.root.Name(), map[string]string{"src/a": "12345", "src/b": "12345", "src/c/": ""})
	for _, x := range []struct {
		remote string
		o      coppice.CopyOptions
		ok     bool
	}{
		{"/src", coppice.CopyOptions{MaxBytes: 10}, true},
		{"/src", coppice.CopyOptions{MaxBytes: 9}, false},
		{"/src", coppice.CopyOptions{MaxEntries: 4}, true},
		{"/src", coppice.CopyOptions{MaxEntries: 3}, false},
		{"/src/a", coppice.CopyOptions{MaxBytes: 5}, true},
		{"/src/a", coppice.CopyOptions{MaxBytes: 4}, false},
	} {
		dir := t.TempDir()
		got, err := c.CopyFromWith(t.Context(), "ws_1", x.remote, dir, x.o)
		if (err == nil) != x.ok || err != nil && !strings.Contains(err.Error(), "raise the bound") {
			t.Errorf("%s with %+v: %+v, %v", x.remote, x.o, got, err)
		}
		if left := list(t, dir); !x.ok && x.remote == "/src/a" && len(left) > 0 {
			t.Errorf("half a file is left: %v", left)
		}
	}
}

// asUser calls do as a user who is bound by the modes of files. It changes the user of this thread, which ends with the
// call.
func asUser(t *testing.T, dir string, do func() error) error {
	t.Helper()
	const nobody = 65534
	if os.Geteuid() == 0 {
		for _, err := range []error{os.Chmod(filepath.Dir(dir), 0o755), os.Chown(dir, nobody, nobody)} {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends
		if os.Geteuid() == 0 {
			if _, err := unix.SetfsuidRetUid(nobody); err != nil {
				done <- err
				return
			}
		}
		done <- do()
	}()
	return <-done
}

// TestCopyModes copies directories that their owner may not enter, or not write. Each gets its mode, and nothing is
// missing.
func TestCopyModes(t *testing.T) {
	t.Parallel()
	for range 20 { // the order was random
		g, c := newGuest(t)
		modes := map[string]fs.FileMode{"src/a/b/c/d": 0o500, "src/a/b/c": 0o750, "src/a/b": 0o600, "src/a": 0o400, "src/e": 0o600, "src/e/f": 0o000}
		for name := range modes {
			tree(t, g.root.Name(), map[string]string{name + "/file": "x"})
		}
		for name, mode := range modes {
			if err := os.Chmod(filepath.Join(g.root.Name(), name), mode); err != nil {
				t.Fatal(err)
			}
		}
		dir := t.TempDir()
		if err := asUser(t, dir, func() error {
			_, err := c.CopyFrom(t.Context(), "ws_1", "/src", dir)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		for name, mode := range modes {
			if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != mode {
				t.Errorf("%s: %v, %v, want %v", name, info.Mode(), err, mode)
			}
			if b, err := os.ReadFile(filepath.Join(dir, name, "file")); err != nil || string(b) != "x" {
				t.Errorf("%s/file: %q, %v", name, b, err)
			}
		}
	}
}

// TestCopyInPlace copies onto existing files. They stay the same files with their modes, like after cp. A link, and a
// file with another name, are replaced, and the file behind them keeps its content.
func TestCopyInPlace(t *testing.T) {
	t.Parallel()
	for _, remote := range []string{"/src/a", "/src/."} {
		g, c := newGuest(t)
		tree(t, g.root.Name(), map[string]string{"src/a": "new"})
		dir := tree(t, t.TempDir(), map[string]string{"plain/a": "older and longer", "linked/a": "-> ../mine", "named/a": "mine", "closed/a": "older", "mine": "mine"})
		for _, err := range []error{
			os.Link(filepath.Join(dir, "named/a"), filepath.Join(dir, "other name")), os.Chmod(filepath.Join(dir, "plain/a"), 0o604),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
		before, err := os.Stat(filepath.Join(dir, "plain/a"))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"plain", "linked", "named", "closed", "empty"} {
			if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
				t.Fatal(err)
			}
			if _, err := c.CopyFrom(t.Context(), "ws_1", remote, filepath.Join(dir, name)); err != nil {
				t.Errorf("%s to %s: %v", remote, name, err)
			}
		}
		after, err := os.Stat(filepath.Join(dir, "plain/a"))
		if err != nil || !os.SameFile(before, after) || after.Mode() != before.Mode() {
			t.Errorf("%s: the file that was there is another now: %v, %v", remote, after, err)
		}
		got := list(t, dir)
		for name, want := range map[string]string{
			"plain/a": "new", "linked/a": "new", "named/a": "new", "closed/a": "new", "empty/a": "new", "mine": "mine", "other name": "mine",
		} {
			if got[name] != want {
				t.Errorf("%s: %s is %q, want %q", remote, name, got[name], want)
			}
		}
		for name := range got {
			if strings.Contains(name, ".coppice-") {
				t.Errorf("%s is left", name)
			}
		}
	}
}

// TestCopyOntoPrivileged: bytes from a guest get neither the set-user-ID and set-group-ID bits nor the owner of an
// existing file.
func TestCopyOntoPrivileged(t *testing.T) {
	t.Parallel()
	for _, remote := range []string{"/src/a", "/src/."} {
		g, c := newGuest(t)
		tree(t, g.root.Name(), map[string]string{"src/a": "new"})
		dir := tree(t, t.TempDir(), map[string]string{"user/a": "old", "group/a": "old", "other/a": "old"})
		for name, mode := range map[string]os.FileMode{"user": 0o755 | os.ModeSetuid, "group": 0o755 | os.ModeSetgid} {
			if err := os.Chmod(filepath.Join(dir, name, "a"), mode); err != nil {
				t.Fatal(err)
			}
		}
		names := []string{"user", "group"}
		if os.Geteuid() == 0 {
			names = append(names, "other")
			if err := os.Chown(filepath.Join(dir, "other/a"), 1, 1); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range names {
			was, err := os.Open(filepath.Join(dir, name, "a")) // while the file is open, its inode number is not reused
			if err != nil {
				t.Fatal(err)
			}
			defer was.Close()
			before, err := was.Stat()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.CopyFrom(t.Context(), "ws_1", remote, filepath.Join(dir, name)); err != nil {
				t.Errorf("%s to %s: %v", remote, name, err)
			}
			after, err := os.Stat(filepath.Join(dir, name, "a"))
			if err != nil || os.SameFile(before, after) || after.Mode()&(os.ModeSetuid|os.ModeSetgid) != 0 {
				t.Errorf("%s to %s: the bytes of a guest are in a file with the rights of others: %v, %v", remote, name, after, err)
			}
		}
	}
}

// TestCopyFailsInPlace: a failed copy leaves an existing file unchanged.
func TestCopyFailsInPlace(t *testing.T) {
	t.Parallel()
	g, c := newGuest(t)
	tree(t, g.root.Name(), map[string]string{"src/a": "far too long"})
	dir := tree(t, t.TempDir(), map[string]string{"a": "mine"})
	if _, err := c.CopyFromWith(t.Context(), "ws_1", "/src/a", dir, coppice.CopyOptions{MaxBytes: 4}); err == nil {
		t.Error("a bound was not kept")
	}
	if got := list(t, dir); len(got) != 1 || got["a"] != "mine" {
		t.Errorf("%v is left", got)
	}
}

// TestCutCopyLeavesTheFileAlone: an archive that ends in the middle of a file leaves the file that is there, and nothing beside it.
func TestCutCopyLeavesTheFileAlone(t *testing.T) {
	t.Parallel()
	var whole bytes.Buffer
	tw := tar.NewWriter(&whole)
	if err := tw.WriteHeader(&tar.Header{Name: "src/f", Typeflag: tar.TypeReg, Mode: 0o600, Size: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("stat") {
			_, _ = io.WriteString(w, `{"path":"/src","name":"src","type":"dir","size":0,"mode":"0755"}`)
			return
		}
		_, _ = w.Write(whole.Bytes())
		_, _ = io.WriteString(w, "half")
	}))
	t.Cleanup(srv.Close)
	c, err := coppice.New(coppice.Config{Server: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	var told int64
	if _, err := c.CopyFromWith(t.Context(), "ws_1", "/src/.", dir, coppice.CopyOptions{Progress: func(n int64) { told = n }}); err == nil {
		t.Error("half a file was taken")
	}
	if want := int64(whole.Len() + len("half")); told != want {
		t.Errorf("the progress ended at %d bytes, want %d", told, want)
	}
	entries, err := os.ReadDir(dir)
	if b, _ := os.ReadFile(filepath.Join(dir, "f")); err != nil || len(entries) != 1 || string(b) != "old" {
		t.Errorf("the file is %q, beside it %d others; %v", b, len(entries)-1, err)
	}
}
