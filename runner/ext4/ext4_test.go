package ext4

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/runner/ext4/ext4test"
)

func open(t *testing.T, path string) *FS {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	fs, err := Open(f, info.Size())
	if err != nil {
		t.Fatal(err)
	}
	return fs
}

// walk describes every file below a directory.
func walk(t *testing.T, fs *FS, number uint32, path string, out map[string]string) {
	t.Helper()
	in, err := fs.Inode(number)
	if err != nil {
		t.Fatal(path, err)
	}
	text := fmt.Sprintf("%o %d:%d", in.Mode, in.UID, in.GID)
	if in.ModTime.Year() > 2100 {
		text += " modified " + in.ModTime.Format(time.DateTime)
	}
	switch in.Type() {
	case TypeDir:
		list, err := fs.ReadDir(in)
		if err != nil {
			t.Fatal(path, err)
		}
		for _, e := range list {
			walk(t, fs, e.Inode, path+"/"+e.Name, out)
		}
	case TypeSymlink:
		target, err := fs.Readlink(in)
		if err != nil {
			t.Fatal(path, err)
		}
		text += " -> " + target
	case TypeRegular:
		extents, err := fs.Extents(in)
		if err != nil {
			t.Fatal(path, err)
		}
		b := make([]byte, in.Size)
		if err := fs.ReadExtents(extents, b, 0); err != nil {
			t.Fatal(path, err)
		}
		text += fmt.Sprintf(" %d %.20q", in.Size, bytes.TrimRight(b, "\x00"))
	default:
		text += fmt.Sprintf(" device %d", in.Rdev)
	}
	xattrs, err := fs.Xattrs(in)
	if err != nil {
		t.Fatal(path, err)
	}
	if len(xattrs) > 0 {
		text += fmt.Sprintf(" %q", xattrs)
	}
	out[path] = text
}

func TestRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	from := filepath.Join(dir, "from")
	long := strings.Repeat("a/very/long/target/", 10)
	write := func(name, content string, mode os.FileMode) {
		t.Helper()
		path := filepath.Join(from, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), mode), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
	write("upper/a", "hello", 0o644)
	write("upper/tool", "#!", os.ModeSetuid|0o755)
	write("upper/empty", "", 0o600)
	write("upper/big", strings.Repeat("x", 3<<20), 0o640)
	write("upper/\xff\nname", "odd", 0o644)
	for n := range 3000 { // enough for an indexed directory
		write("upper/many/"+strconv.Itoa(n), "", 0o644)
	}
	if err := errors.Join(os.Symlink("short", filepath.Join(from, "upper/short")), os.Symlink(long, filepath.Join(from, "upper/long"))); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "disk")
	ext4test.Make(t, path, 64<<20, from)
	ext4test.Change(t, path,
		"cd /upper", "mknod gone c 0 0", "mknod null c 1 3", "sif a uid 70000", "sif a gid 80000", "sif a mtime @0x100000000",
		"ea_set a trusted.overlay.origin abc", "ea_set many trusted.overlay.opaque y", "ea_set big user.long "+strings.Repeat("v", 1000),
	)
	fs := open(t, path)
	got := map[string]string{}
	walk(t, fs, Root, "", got)
	own := fmt.Sprintf("%d:%d", os.Getuid(), os.Getgid())
	for name, want := range map[string]string{
		"/upper/a":          `100644 70000:80000 modified 2106-02-07 06:28:16 5 "hello" map["trusted.overlay.origin":"abc"]`,
		"/upper/tool":       `104755 ` + own + ` 2 "#!"`,
		"/upper/empty":      `100600 ` + own + ` 0 ""`,
		"/upper/big":        fmt.Sprintf(`100640 %s %d %.20q map["user.long":%q]`, own, 3<<20, strings.Repeat("x", 20), strings.Repeat("v", 1000)),
		"/upper/\xff\nname": `100644 ` + own + ` 3 "odd"`,
		"/upper/short":      `120777 ` + own + ` -> short`,
		"/upper/long":       `120777 ` + own + ` -> ` + long,
		"/upper/gone":       `20000 0:0 device 0`,
		"/upper/null":       `20000 0:0 device 259`,
		"/upper/many":       `40755 ` + own + ` map["trusted.overlay.opaque":"y"]`,
		"/upper/many/2999":  `100644 ` + own + ` 0 ""`,
		"/lost+found":       `40700 0:0`,
	} {
		if diff := cmp.Diff(want, got[name]); diff != "" {
			t.Errorf("%q: %s", name, diff)
		}
	}
	if want := 3000 + 13; len(got) != want {
		t.Errorf("found %d files, want %d", len(got), want)
	}
}
