package diskdiff

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/erofs/go-erofs"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/ext4/ext4test"
)

var long = time.Unix(1_000_000_000, 0)

// writeTree makes files in a directory: a name that ends in a slash is a directory, a content that begins with "-> " a symlink.
func writeTree(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	var err error
	for name, content := range files {
		path := filepath.Join(dir, name)
		err = errors.Join(err, os.MkdirAll(filepath.Dir(path), 0o755))
		target, link := strings.CutPrefix(content, "-> ")
		switch {
		case strings.HasSuffix(name, "/"):
			err = errors.Join(err, os.MkdirAll(path, 0o755))
		case link:
			err = errors.Join(err, os.Symlink(target, path), unix.Lutimes(path, []unix.Timeval{{Sec: long.Unix()}, {Sec: long.Unix()}}))
		default:
			err = errors.Join(err, os.WriteFile(path, []byte(content), 0o644), os.Chtimes(path, long, long))
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

// image makes the root file system of an image, as package images does.
func image(t *testing.T, files map[string]string) Lower {
	t.Helper()
	mkfs := require.Program(t, "mkfs.erofs", "erofs-utils")
	dir := t.TempDir()
	from, path := filepath.Join(dir, "from"), filepath.Join(dir, "erofs")
	writeTree(t, from, files)
	if out, err := exec.CommandContext(t.Context(), mkfs, "--quiet", path, from).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.erofs: %v: %s", err, out)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	fs, err := erofs.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	return fs.(Lower)
}

// disk makes an overlay disk with these files over the image, changed by commands of debugfs.
func disk(t *testing.T, files map[string]string, commands ...string) *os.File {
	t.Helper()
	dir := t.TempDir()
	from, path := filepath.Join(dir, "from"), filepath.Join(dir, "disk")
	writeTree(t, from, map[string]string{"upper/": "", "work/": ""})
	writeTree(t, filepath.Join(from, "upper"), files)
	ext4test.Make(t, path, 64<<20, from)
	return changed(t, path, commands...)
}

// changed changes a disk, as its guest would, and opens it.
func changed(t *testing.T, path string, commands ...string) *os.File {
	t.Helper()
	if len(commands) > 0 {
		ext4test.Change(t, path, append([]string{"cd /upper"}, commands...)...)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	return f
}

// clone is a disk that began as another.
func clone(t *testing.T, of *os.File, commands ...string) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sparse.Clone(f, of); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return changed(t, path, commands...)
}

// all compares in pages of some changes and describes each on a line.
func all(t *testing.T, lower Lower, a, b *os.File, limit int) []string {
	t.Helper()
	out := []string{}
	for after := []byte(nil); ; {
		p, err := Compare(t.Context(), Request{A: a, B: b, Lower: lower, After: after, Limit: limit})
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Changes) > limit || p.Unreadable > 0 {
			t.Fatalf("a page of %d has %d changes and %d that are unreadable", limit, len(p.Changes), p.Unreadable)
		}
		for _, c := range p.Changes {
			line := fmt.Sprintf("%s %s %s", c.Kind, c.Type, c.Path)
			if c.Kind == Changed {
				line += " " + strings.Join(c.What, ",")
			}
			if c.Size != c.SizeBefore {
				line += fmt.Sprintf(" %d->%d", c.SizeBefore, c.Size)
			}
			out = append(out, line)
		}
		if after = p.Next; len(after) == 0 {
			return out
		}
	}
}

var base = map[string]string{
	"etc/passwd": "root", "etc/hosts": "localhost", "etc/link": "-> hosts", "usr/bin/tool": "tool", "usr/bin/other": "other",
	"usr/lib/a/one": "1", "usr/lib/a/two": "2", "usr/lib/b": "b", "opt/x/y/z": "z", "var/": "",
}

func TestCompare(t *testing.T) {
	t.Parallel()
	lower := image(t, base)
	for name, x := range map[string]struct {
		a, b  map[string]string
		whatA []string
		whatB []string
		want  []string
	}{
		"nothing":          {want: []string{}},
		"a new file":       {b: map[string]string{"root/new": "hello"}, want: []string{"added dir /root", "added file /root/new 0->5"}},
		"a file that went": {a: map[string]string{"root/new": "hello"}, want: []string{"removed dir /root", "removed file /root/new 5->0"}},
		"a file of the image written": {
			b: map[string]string{"etc/passwd": "ROOT"}, want: []string{"changed file /etc/passwd content"},
		},
		"a file of the image copied up and not changed": {b: map[string]string{"etc/passwd": "root"}, want: []string{}},
		"a file of the image grown":                     {b: map[string]string{"etc/passwd": "root and more"}, want: []string{"changed file /etc/passwd content 4->13"}},
		"a file of the image removed":                   {b: map[string]string{"etc/": ""}, whatB: []string{"cd etc", "mknod passwd c 0 0"}, want: []string{"removed file /etc/passwd 4->0"}},
		"a file of the image that comes back":           {a: map[string]string{"etc/": ""}, whatA: []string{"cd etc", "mknod passwd c 0 0"}, want: []string{"added file /etc/passwd 0->4"}},
		"a directory of the image removed": {
			b: map[string]string{"usr/": ""}, whatB: []string{"cd usr", "mknod lib c 0 0"},
			want: []string{"removed dir /usr/lib", "removed dir /usr/lib/a", "removed file /usr/lib/a/one 1->0", "removed file /usr/lib/a/two 1->0", "removed file /usr/lib/b 1->0"},
		},
		"a directory of the image made again": {
			b: map[string]string{"usr/lib/new": "n"}, whatB: []string{"cd usr", "ea_set lib trusted.overlay.opaque y"},
			want: []string{"removed dir /usr/lib/a", "removed file /usr/lib/a/one 1->0", "removed file /usr/lib/a/two 1->0", "removed file /usr/lib/b 1->0", "added file /usr/lib/new 0->1"},
		},
		"a directory of the image renamed": {
			b: map[string]string{"opt/w/": ""}, whatB: []string{"cd opt", "mknod x c 0 0", "ea_set w trusted.overlay.redirect x"},
			want: []string{"added dir /opt/w", "added dir /opt/w/y", "added file /opt/w/y/z 0->1", "removed dir /opt/x", "removed dir /opt/x/y", "removed file /opt/x/y/z 1->0"},
		},
		"a directory of the image moved": {
			b: map[string]string{"var/w/": "", "opt/": ""}, whatB: []string{"cd opt", "mknod x c 0 0", "cd ../var", "ea_set w trusted.overlay.redirect /opt/x"},
			want: []string{"removed dir /opt/x", "removed dir /opt/x/y", "removed file /opt/x/y/z 1->0", "added dir /var/w", "added dir /var/w/y", "added file /var/w/y/z 0->1"},
		},
		"a file that became a directory": {
			b: map[string]string{"etc/passwd/in": "i"}, whatB: []string{"cd etc", "ea_set passwd trusted.overlay.opaque y"},
			want: []string{"changed dir /etc/passwd type 4->0", "added file /etc/passwd/in 0->1"},
		},
		"a directory that became a file": {
			b: map[string]string{"usr/lib": "file"}, want: []string{"changed file /usr/lib type 0->4", "removed dir /usr/lib/a", "removed file /usr/lib/a/one 1->0", "removed file /usr/lib/a/two 1->0", "removed file /usr/lib/b 1->0"},
		},
		"a mode":                      {a: map[string]string{"f": "1"}, b: map[string]string{"f": "1"}, whatB: []string{"sif f mode 0104711"}, want: []string{"changed file /f mode"}},
		"a directory's mode":          {b: map[string]string{"var/": ""}, whatB: []string{"sif var mode 041777"}, want: []string{"changed dir /var mode"}},
		"an owner":                    {a: map[string]string{"f": "1"}, b: map[string]string{"f": "1"}, whatB: []string{"sif f uid 4000000000"}, want: []string{"changed file /f owner"}},
		"a time":                      {a: map[string]string{"f": "1"}, b: map[string]string{"f": "1"}, whatB: []string{"sif f mtime @5"}, want: []string{"changed file /f mtime"}},
		"a target":                    {b: map[string]string{"etc/link": "-> hostz"}, want: []string{"changed symlink /etc/link target"}},
		"a device's number":           {whatA: []string{"mknod d c 1 3"}, whatB: []string{"mknod d c 1 5"}, want: []string{"changed other /d device"}},
		"a whiteout by attribute":     {b: map[string]string{"etc/passwd": ""}, whatB: []string{"cd etc", "ea_set passwd trusted.overlay.whiteout y"}, want: []string{"removed file /etc/passwd 4->0"}},
		"attributes without content":  {b: map[string]string{"etc/passwd": ""}, whatB: []string{"cd etc", "sif passwd size 4", "sif passwd mode 0100600", "ea_set passwd trusted.overlay.metacopy 0"}, want: []string{"changed file /etc/passwd mode"}},
		"names of any bytes":          {b: map[string]string{"etc/\xff\n\x1b[1m": "x"}, want: []string{"added file /etc/\xff\n\x1b[1m 0->1"}},
		"a redirect that leads out":   {b: map[string]string{"w/": ""}, whatB: []string{"ea_set w trusted.overlay.redirect /../../etc"}, want: []string{"added dir /w"}},
		"a redirect to a file":        {b: map[string]string{"w/": ""}, whatB: []string{"ea_set w trusted.overlay.redirect /etc/passwd"}, want: []string{"added dir /w"}},
		"attributes of no file":       {b: map[string]string{"f": ""}, whatB: []string{"ea_set f trusted.overlay.metacopy 0"}, want: []string{"added file /f"}},
		"the overlay's own directory": {whatB: []string{"cd /work", "mkdir work"}, want: []string{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, b := disk(t, x.a, x.whatA...), disk(t, x.b, x.whatB...)
			for _, limit := range []int{1, 2, 1000} {
				got := all(t, lower, a, b, limit)
				if diff := cmp.Diff(x.want, got); diff != "" {
					t.Errorf("in pages of %d: %s", limit, diff)
				}
			}
			if back := all(t, lower, b, a, 1000); len(back) != len(x.want) {
				t.Errorf("there are %d changes, and %d in the other direction: %q", len(x.want), len(back), back)
			}
			if same := all(t, lower, b, clone(t, b), 1000); len(same) > 0 {
				t.Errorf("a disk differs from its clone: %q", same)
			}
		})
	}
}

func TestContentOfClones(t *testing.T) {
	t.Parallel()
	lower := image(t, base)
	files := map[string]string{}
	for i := range 200 {
		files["data/"+strconv.Itoa(i)] = strings.Repeat(strconv.Itoa(i), 5000)
	}
	a := disk(t, files)
	// The same bytes at another place, other bytes at the same place, and neither size nor time tells.
	b := clone(t, a, "cd data", "dump 7 "+filepath.Join(t.TempDir(), "seven"))
	if got := all(t, lower, a, b, 10); len(got) > 0 {
		t.Errorf("clones differ: %q", got)
	}
	w, err := os.OpenFile(b.Name(), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = w.Close() }()
	content, err := os.ReadFile(b.Name())
	if err != nil {
		t.Fatal(err)
	}
	at := strings.Index(string(content), strings.Repeat("142", 100))
	if _, err := w.WriteAt([]byte("X"), int64(at)+9000); err != nil {
		t.Fatal(err)
	}
	if err := w.Sync(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"changed file /data/142 content"}, all(t, lower, a, b, 10)); diff != "" {
		t.Error(diff)
	}
}

// TestEndsInTime: a time that is over still lets each page get one path further, and the pages together say all.
func TestEndsInTime(t *testing.T) {
	t.Parallel()
	lower := image(t, base)
	a, b := disk(t, nil), disk(t, map[string]string{"etc/passwd": "ROOT", "a/b/c": "1", "zz": "2"})
	var got []string
	pages := 0
	for after := []byte(nil); ; pages++ {
		p, err := Compare(t.Context(), Request{A: a, B: b, Lower: lower, After: after, Limit: 100, Until: time.Now().Add(-time.Second)})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range p.Changes {
			got = append(got, string(c.Path))
		}
		if after = p.Next; len(after) == 0 {
			break
		}
	}
	if diff := cmp.Diff([]string{"/a", "/a/b", "/a/b/c", "/etc/passwd", "/zz"}, got); diff != "" || pages < 5 {
		t.Errorf("%d pages: %s", pages, diff)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("over")
	cancel(cause)
	if _, err := Compare(ctx, Request{A: a, B: b, Lower: lower, Limit: 1}); !errors.Is(err, cause) {
		t.Errorf("got %v", err)
	}
}
