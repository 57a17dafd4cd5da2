package build

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/require"
)

var tarTime = time.Unix(1_600_000_000, 0)

// makeTar writes an archive; a header without a time or mode gets one.
func makeTar(t *testing.T, entries []tar.Header, contents map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		data := contents[h.Name]
		if h.Typeflag == tar.TypeReg && h.Size == 0 {
			h.Size = int64(len(data))
		}
		if h.ModTime.IsZero() {
			h.ModTime = tarTime
		}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// staging returns an empty directory inside a directory that must stay unchanged.
func staging(t *testing.T) (dir string, untouched func()) {
	t.Helper()
	outer := t.TempDir()
	dir = filepath.Join(outer, "tree")
	canary := filepath.Join(outer, "canary")
	for _, err := range []error{os.Mkdir(dir, 0o755), os.WriteFile(canary, []byte("alive"), 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir, func() {
		t.Helper()
		names := []string{}
		entries, err := os.ReadDir(outer)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		if diff := cmp.Diff([]string{"canary", "tree"}, names); diff != "" {
			t.Errorf("files outside the tree (-want +got):\n%s", diff)
		}
		if raw, err := os.ReadFile(canary); err != nil || string(raw) != "alive" {
			t.Errorf("the file outside holds %q, %v", raw, err)
		}
	}
}

func TestUntarKeepsEverything(t *testing.T) {
	t.Parallel()
	require.Root(t)
	entries := []tar.Header{
		{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./usr/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./bin", Typeflag: tar.TypeSymlink, Linkname: "usr/bin"},
		{Name: "./usr/bin/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./usr/bin/su", Typeflag: tar.TypeReg, Mode: 0o4755},
		{Name: "./usr/bin/ping", Typeflag: tar.TypeReg, Mode: 0o755, PAXRecords: map[string]string{
			"SCHILY.xattr.security.capability":    "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
			"SCHILY.xattr.trusted.overlay.opaque": "y",
			"SCHILY.xattr.security.selinux":       "host_label",
		}},
		{Name: "./usr/bin/su-link", Typeflag: tar.TypeLink, Linkname: "./usr/bin/su"},
		{Name: "./home/user/", Typeflag: tar.TypeDir, Mode: 0o2750, Uid: 1000, Gid: 1001},
		{Name: "./home/user/absolute", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd", Uid: 1000, Gid: 1001},
		{Name: "./srv/fifo", Typeflag: tar.TypeFifo, Mode: 0o640},
		{Name: "./srv/zero", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 5},
		{Name: "./dev/sda", Typeflag: tar.TypeBlock, Mode: 0o666, Devmajor: 8},
		{Name: "./proc/cpuinfo", Typeflag: tar.TypeReg},
		{Name: "./etc/twice", Typeflag: tar.TypeReg},
		{Name: "./etc/twice", Typeflag: tar.TypeReg, Mode: 0o600},
		{Name: "./bin/", Typeflag: tar.TypeDir, Mode: 0o700}, // changes nothing about the link
		{Name: "/absolute", Typeflag: tar.TypeReg},
	}
	raw := makeTar(t, entries, map[string]string{"./usr/bin/su": "setuid", "./etc/twice": "text", "/absolute": "inside"})
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	if _, err := z.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	for name, archive := range map[string][]byte{"plain": raw, "gzip": zipped.Bytes()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, untouched := staging(t)
			digest, err := untar(t.Context(), bytes.NewReader(archive), dir, defaultUntarLimits)
			if err != nil || digest != core.DigestOf(archive) {
				t.Fatal(digest, err)
			}
			untouched()
			checkUnpacked(t, dir)
		})
	}
}

func checkUnpacked(t *testing.T, dir string) {
	t.Helper()
	stat := func(name string) unix.Stat_t {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(dir, name), &st); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return st
	}
	for name, want := range map[string]struct{ mode, uid, gid uint32 }{
		".":                  {unix.S_IFDIR | 0o755, 0, 0},
		"bin":                {unix.S_IFLNK | 0o777, 0, 0},
		"usr/bin":            {unix.S_IFDIR | 0o755, 0, 0},
		"usr/bin/su":         {unix.S_IFREG | 0o4755, 0, 0},
		"home/user":          {unix.S_IFDIR | 0o2750, 1000, 1001},
		"home/user/absolute": {unix.S_IFLNK | 0o777, 1000, 1001},
		"srv/fifo":           {unix.S_IFIFO | 0o640, 0, 0},
		"srv/zero":           {unix.S_IFCHR | 0o666, 0, 0},
		"etc/twice":          {unix.S_IFREG | 0o600, 0, 0},
	} {
		st := stat(name)
		if st.Mode != want.mode || st.Uid != want.uid || st.Gid != want.gid {
			t.Errorf("%s: mode %o owner %d:%d, want %o %d:%d", name, st.Mode, st.Uid, st.Gid, want.mode, want.uid, want.gid)
		}
		if st.Mtim.Sec != tarTime.Unix() {
			t.Errorf("%s: time %d, want %d", name, st.Mtim.Sec, tarTime.Unix())
		}
	}
	if st := stat("home"); st.Mode != unix.S_IFDIR|0o755 || st.Uid != 0 || st.Gid != 0 {
		t.Errorf("a directory that the archive left out has mode %o and owner %d:%d", st.Mode, st.Uid, st.Gid)
	}
	if a, b := stat("usr/bin/su"), stat("usr/bin/su-link"); a.Ino != b.Ino || a.Nlink != 2 {
		t.Errorf("hard link: inodes %d and %d, %d links", a.Ino, b.Ino, a.Nlink)
	}
	if st := stat("srv/zero"); unix.Major(st.Rdev) != 1 || unix.Minor(st.Rdev) != 5 {
		t.Errorf("device number is %d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	}
	for _, name := range []string{"dev/sda", "proc/cpuinfo"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s was unpacked (%v)", name, err)
		}
	}
	var attrs [256]byte
	n, err := unix.Listxattr(filepath.Join(dir, "usr/bin/ping"), attrs[:])
	if got := string(attrs[:max(n, 0)]); err != nil || got != "security.capability\x00" {
		t.Errorf("attributes are %q, %v", got, err)
	}
	if raw, err := os.ReadFile(filepath.Join(dir, "absolute")); err != nil || string(raw) != "inside" {
		t.Errorf("a rooted name gave %q, %v", raw, err)
	}
}

// TestUntarRefusesHostileArchives: each archive must fail with a clear error, and nothing outside may change.
func TestUntarRefusesHostileArchives(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeDir} }
	file := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeReg} }
	link := func(name, to string) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}
	}
	hard := func(name, to string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to} }
	usr := dir("usr/")
	for name, c := range map[string]struct {
		entries []tar.Header
		want    string
	}{
		"dot dot":                        {[]tar.Header{usr, file("../canary")}, ".."},
		"dot dot inside":                 {[]tar.Header{usr, file("usr/../../canary")}, ".."},
		"through a relative link out":    {[]tar.Header{usr, link("usr/out", "../.."), file("usr/out/canary")}, "usr/out/canary"},
		"through an absolute link":       {[]tar.Header{usr, link("usr/out", "/tmp"), file("usr/out/canary")}, "usr/out/canary"},
		"through two links":              {[]tar.Header{usr, link("usr/a", ".."), link("usr/b", "a/.."), file("usr/b/canary")}, "usr/b/canary"},
		"directory through a link":       {[]tar.Header{usr, link("usr/out", "../.."), dir("usr/out/new/")}, "usr/out/new"},
		"mode of a directory outside":    {[]tar.Header{usr, link("usr/out", "../.."), dir("usr/out/")}, "was there before"},
		"hard link out":                  {[]tar.Header{usr, hard("usr/c", "../canary")}, ".."},
		"hard link through a link":       {[]tar.Header{usr, link("usr/out", "../.."), hard("usr/c", "usr/out/canary")}, "usr/c"},
		"hard link to nothing":           {[]tar.Header{usr, hard("usr/c", "usr/none")}, "no such file"},
		"hard link to a directory":       {[]tar.Header{usr, dir("usr/d/"), hard("usr/c", "usr/d")}, "usr/c"},
		"hard link to a dropped file":    {[]tar.Header{usr, hard("usr/c", "dev/sda")}, "never sees"},
		"below a file":                   {[]tar.Header{usr, file("usr/f"), file("usr/f/g")}, "usr/f/g"},
		"file over a directory":          {[]tar.Header{usr, dir("usr/d/"), file("usr/d/x"), file("usr/d")}, "directory of that name"},
		"root is a file":                 {[]tar.Header{file(".")}, "root directory"},
		"root is a link":                 {[]tar.Header{link(".", "/")}, "root directory"},
		"unknown type":                   {[]tar.Header{usr, {Name: "usr/x", Typeflag: 'Z'}}, "type"},
		"device number out of bounds":    {[]tar.Header{usr, {Name: "usr/x", Typeflag: tar.TypeBlock, Devmajor: 1 << 20}}, "device number"},
		"parent is a device":             {[]tar.Header{usr, {Name: "usr/x", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}, file("usr/x/y")}, "usr/x/y"},
		"loop of links":                  {[]tar.Header{usr, link("usr/a", "b"), link("usr/b", "a"), file("usr/a/x")}, "usr/a/x"},
		"not a root file system":         {[]tar.Header{file("readme.txt")}, "docker export"},
		"docker save":                    {[]tar.Header{file("manifest.json"), dir("blobs/")}, "docker save"},
		"name with a component too long": {[]tar.Header{usr, file("usr/" + strings.Repeat("x", 300))}, "usr/xxx"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tree, untouched := staging(t)
			_, err := untar(t.Context(), bytes.NewReader(makeTar(t, c.entries, nil)), tree, defaultUntarLimits)
			untouched()
			if core.CodeOf(err) != CodeInvalidTar || !strings.Contains(core.MessageOf(err), c.want) {
				t.Errorf("err = %v, want %s with %q", err, CodeInvalidTar, c.want)
			}
		})
	}
}

func TestUntarBoundsSizes(t *testing.T) {
	t.Parallel()
	require.Root(t)
	small := untarLimits{Bytes: 1 << 20, Entries: 5, Stream: 4 << 20, Names: 1 << 10, LookUps: 1 << 20}
	// A header that promises an exabyte, with nothing after it.
	var huge bytes.Buffer
	w := tar.NewWriter(&huge)
	for _, h := range []tar.Header{{Name: "usr/", Typeflag: tar.TypeDir, Mode: 0o755}, {Name: "usr/huge", Typeflag: tar.TypeReg, Mode: 0o644, Size: 1 << 60}} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	many := []tar.Header{{Name: "usr/", Typeflag: tar.TypeDir}}
	for i := range 6 {
		many = append(many, tar.Header{Name: "usr/" + strings.Repeat("x", i+1), Typeflag: tar.TypeReg})
	}
	// A bomb: a megabyte and a bit of zeros, in a kilobyte of gzip.
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	if _, err := z.Write(makeTar(t, []tar.Header{{Name: "usr/zeros", Typeflag: tar.TypeReg}}, map[string]string{"usr/zeros": strings.Repeat("\x00", 1<<20+1)})); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		raw  []byte
		want string
	}{
		"huge header": {huge.Bytes(), "1 MiB"},
		"many":        {makeTar(t, many, nil), "5 entries"},
		"bomb":        {bomb.Bytes(), "1 MiB"},
		"truncated":   {makeTar(t, []tar.Header{{Name: "usr/a", Typeflag: tar.TypeReg}}, map[string]string{"usr/a": strings.Repeat("a", 4096)})[:2048], "cannot be"},
		"garbage":     {bytes.Repeat([]byte("not a tar "), 200), "docker export"},
		"empty":       {nil, "docker export"},
		"zstd":        {[]byte("\x28\xb5\x2f\xfd and so on"), "zstd -dc"},
		"xz":          {[]byte("\xfd7zXZ\x00 and so on"), "xz -dc"},
		"bad gzip":    {[]byte("\x1f\x8b and so on and on"), "gzip"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tree, untouched := staging(t)
			_, err := untar(t.Context(), bytes.NewReader(c.raw), tree, small)
			untouched()
			if core.CodeOf(err) != CodeInvalidTar || !strings.Contains(core.MessageOf(err), c.want) {
				t.Errorf("err = %v, want %s with %q", err, CodeInvalidTar, c.want)
			}
			if strings.Contains(core.MessageOf(err), tree) {
				t.Errorf("the message names a path of the host: %v", err)
			}
		})
	}
}

func TestUntarStopsWhenCancelled(t *testing.T) {
	t.Parallel()
	require.Root(t)
	ctx, cancel := context.WithCancel(t.Context())
	// The archive never ends: after its first entry, the reader waits until the test gives up.
	raw := makeTar(t, []tar.Header{{Name: "usr/", Typeflag: tar.TypeDir}, {Name: "usr/a", Typeflag: tar.TypeReg, Size: 1}}, map[string]string{"usr/a": "x"})
	r := io.MultiReader(bytes.NewReader(raw[:512]), cancelReader{cancel}, bytes.NewReader(raw[512:]))
	dir, untouched := staging(t)
	_, err := untar(ctx, r, dir, defaultUntarLimits)
	untouched()
	if !errors.Is(err, context.Canceled) {
		t.Errorf("err = %v, want %v", err, context.Canceled)
	}
}

// cancelReader cancels when the archive is read that far.
type cancelReader struct{ cancel func() }

func (c cancelReader) Read([]byte) (int, error) {
	c.cancel()
	return 0, io.EOF
}

func FuzzArchivePath(f *testing.F) {
	for _, s := range []string{"", ".", "..", "/", "a/../b", "./a//b/", "/etc/passwd", "a/..", "...", "a\x00b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := archivePath(s)
		if err == nil && got != "." && !filepath.IsLocal(got) {
			t.Errorf("archivePath(%q) = %q, which leads out", s, got)
		}
	})
}
