package build

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// stack are layers in memory, as a registry has them.
type stack struct {
	layers []images.Layer
	blobs  map[core.Digest][]byte
}

func (s *stack) add(plain, blob []byte) {
	if s.blobs == nil {
		s.blobs = map[core.Digest][]byte{}
	}
	d := core.DigestOf(blob)
	s.blobs[d] = blob
	s.layers = append(s.layers, images.Layer{Digest: d, Content: core.DigestOf(plain), SizeBytes: int64(len(blob))})
}

func (s *stack) open(l images.Layer) (io.ReadCloser, error) {
	b, ok := s.blobs[l.Digest]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}

// entry is one entry of a layer, as a line: "d name", "f name content", "l name -> target", "h name -> target".
func entry(t *testing.T, line string) (h tar.Header, content string) {
	t.Helper()
	kind, rest, _ := strings.Cut(line, " ")
	name, content, _ := strings.Cut(rest, " ")
	target := strings.TrimPrefix(content, "-> ")
	switch kind {
	case "d":
		return tar.Header{Name: name + "/", Typeflag: tar.TypeDir}, ""
	case "f":
		return tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, content
	case "l":
		return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target}, ""
	case "h":
		return tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: target}, ""
	case "c":
		return tar.Header{Name: name, Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 5}, ""
	}
	t.Fatalf("%q is no entry", line)
	return tar.Header{}, ""
}

// stackOf makes layers, each from its lines, alternately plain and compressed by gzip and by zstd.
func stackOf(t *testing.T, layers ...[]string) *stack {
	t.Helper()
	s := &stack{}
	for i, lines := range layers {
		var entries []tar.Header
		contents := map[string]string{}
		for _, line := range lines {
			h, content := entry(t, line)
			entries = append(entries, h)
			contents[h.Name] = content
		}
		plain := makeTar(t, entries, contents)
		switch i % 3 {
		case 0:
			s.add(plain, zipped(t, func(w io.Writer) { _, _ = w.Write(plain) }))
		case 1:
			s.add(plain, plain)
		case 2:
			e, err := zstd.NewWriter(nil)
			if err != nil {
				t.Fatal(err)
			}
			s.add(plain, e.EncodeAll(plain, nil))
		}
	}
	return s
}

// tree lists what is in a directory: files with their content, links with their target.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		name, _ := filepath.Rel(dir, path)
		switch d.Type() {
		case fs.ModeDir:
			out[name] = "/"
		case fs.ModeSymlink:
			target, err := os.Readlink(path)
			out[name] = "-> " + target
			return err
		case 0:
			raw, err := os.ReadFile(path)
			out[name] = string(raw)
			return err
		default:
			out[name] = d.Type().String()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestLayers: upper layers add to, replace and remove what lower layers have, as the specification of OCI says.
func TestLayers(t *testing.T) {
	t.Parallel()
	require.Root(t)
	for name, c := range map[string]struct {
		layers [][]string
		want   map[string]string
	}{
		"add and replace": {
			[][]string{{"d etc", "f etc/a 1", "f etc/b 1"}, {"f etc/b 2", "f etc/c 2"}, {"f etc/c 3"}},
			map[string]string{"etc": "/", "etc/a": "1", "etc/b": "2", "etc/c": "3"},
		},
		"a whiteout of a file and of a directory": {
			[][]string{{"d etc", "f etc/a 1", "d etc/d", "f etc/d/x 1"}, {"f etc/.wh.a", "f etc/.wh.d", "f etc/.wh.none"}},
			map[string]string{"etc": "/"},
		},
		"a whiteout after what the same layer makes": {
			[][]string{{"f a 1", "f d/old 1"}, {"f a 2", "f .wh.a", "f d/new 2", "f .wh.d"}},
			map[string]string{"a": "2", "d": "/", "d/new": "2"},
		},
		"an opaque directory, wherever its mark is": {
			[][]string{
				{"d a", "f a/old 1", "d a/sub", "f a/sub/old 1", "d b", "f b/old 1"},
				{"d a", "f a/.wh..wh..opq", "f a/new 2", "f b/sub/new 2", "f b/.wh..wh..opq"},
			},
			map[string]string{"a": "/", "a/new": "2", "b": "/", "b/sub": "/", "b/sub/new": "2"},
		},
		"an opaque directory keeps what its layer made in one that was there": {
			[][]string{{"d a", "d a/sub", "f a/sub/old 1"}, {"f a/sub/new 2", "f a/.wh..wh..opq"}},
			map[string]string{"a": "/", "a/sub": "/", "a/sub/new": "2"},
		},
		"a later layer brings back":           {[][]string{{"f a 1"}, {"f .wh.a"}, {"f a 3"}}, map[string]string{"a": "3"}},
		"marks of aufs":                       {[][]string{{"f a 1"}, {"f .wh..wh.plnk x", "f .wh..wh.aufs x"}}, map[string]string{"a": "1"}},
		"a file for a directory":              {[][]string{{"d a", "f a/x 1"}, {"f a 2"}}, map[string]string{"a": "2"}},
		"a directory for a file":              {[][]string{{"f a 1"}, {"d a", "f a/x 2"}}, map[string]string{"a": "/", "a/x": "2"}},
		"a directory for a link":              {[][]string{{"d b", "l a -> b"}, {"d a", "f a/x 2"}}, map[string]string{"a": "/", "a/x": "2", "b": "/"}},
		"a link for a directory":              {[][]string{{"d b", "d a", "f a/x 1"}, {"l a -> b"}, {"f a/y 3"}}, map[string]string{"a": "-> b", "b": "/", "b/y": "3"}},
		"a file below a link of the image":    {[][]string{{"d usr/lib", "l lib -> usr/lib"}, {"f lib/x 2"}}, map[string]string{"usr": "/", "usr/lib": "/", "usr/lib/x": "2", "lib": "-> usr/lib"}},
		"an absolute link stays inside":       {[][]string{{"d var", "d srv/data", "l var/data -> /srv/data"}, {"f var/data/x 2"}}, map[string]string{"var": "/", "srv": "/", "srv/data": "/", "srv/data/x": "2", "var/data": "-> /srv/data"}},
		"a link above the root stays inside":  {[][]string{{"d a", "l a/up -> ../../../b"}, {"f a/up/x 2"}}, map[string]string{"a": "/", "a/up": "-> ../../../b", "b": "/", "b/x": "2"}},
		"a whiteout below a link":             {[][]string{{"f b/x 1", "l a -> b"}, {"f a/.wh.x"}}, map[string]string{"a": "-> b", "b": "/"}},
		"a whiteout of a link":                {[][]string{{"f b/x 1", "l a -> b"}, {"f .wh.a"}}, map[string]string{"b": "/", "b/x": "1"}},
		"a hard link to a lower layer":        {[][]string{{"f usr/x 1"}, {"h y -> usr/x"}}, map[string]string{"usr": "/", "usr/x": "1", "y": "1"}},
		"a hard link through a link":          {[][]string{{"f usr/x 1", "l u -> /usr"}, {"h y -> u/x"}}, map[string]string{"usr": "/", "usr/x": "1", "u": "-> /usr", "y": "1"}},
		"a hard link that replaces":           {[][]string{{"f x 1", "f y 1"}, {"f x 2", "h y -> x"}}, map[string]string{"x": "2", "y": "2"}},
		"a replaced file leaves its others":   {[][]string{{"f x 1", "h y -> x"}, {"f x 2"}}, map[string]string{"x": "2", "y": "1"}},
		"a device node":                       {[][]string{{"c srv/zero"}}, map[string]string{"srv": "/", "srv/zero": "Dc---------"}},
		"what a guest mounts over is dropped": {[][]string{{"c dev/zero", "f proc/x 1", "f run/x 1", "l r -> run", "f r/y 1"}}, map[string]string{"r": "-> run"}},
		"the same layer twice":                {[][]string{{"f a 1"}, {"f .wh.a"}, {"f a 1"}}, map[string]string{"a": "1"}},
		"a program alone":                     {[][]string{{"f hello x"}}, map[string]string{"hello": "x"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := stackOf(t, c.layers...)
			dir, untouched := staging(t)
			if err := untarLayers(t.Context(), s.layers, s.open, dir, defaultUntarLimits); err != nil {
				t.Fatal(err)
			}
			untouched()
			if diff := cmp.Diff(c.want, tree(t, dir)); diff != "" {
				t.Errorf("the tree (-want +got):\n%s", diff)
			}
		})
	}
}

// TestLayersKeepEverything: owners, modes, times, capabilities and hard links arrive, and a directory has what the last
// layer says about it.
func TestLayersKeepEverything(t *testing.T) {
	t.Parallel()
	require.Root(t)
	capability := "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	later := tarTime.Add(time.Hour)
	first := makeTar(t, []tar.Header{
		{Name: "home/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "home/app/", Typeflag: tar.TypeDir, Mode: 0o2750, Uid: 1000, Gid: 1001},
		{Name: "home/app/su", Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 70_000},
		{Name: "bin/ping", Typeflag: tar.TypeReg, Mode: 0o755, PAXRecords: map[string]string{
			"SCHILY.xattr.security.capability": capability, "SCHILY.xattr.user.note": "x", "SCHILY.xattr.trusted.overlay.opaque": "y",
		}},
	}, nil)
	second := makeTar(t, []tar.Header{
		{Name: "home/", Typeflag: tar.TypeDir, Mode: 0o700, Uid: 5, ModTime: later},
		{Name: "home/app/more", Typeflag: tar.TypeLink, Linkname: "home/app/su"},
	}, nil)
	s := &stack{}
	s.add(first, first)
	s.add(second, second)
	dir, _ := staging(t)
	if err := untarLayers(t.Context(), s.layers, s.open, dir, defaultUntarLimits); err != nil {
		t.Fatal(err)
	}
	stat := func(name string) unix.Stat_t {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(dir, name), &st); err != nil {
			t.Fatal(err)
		}
		return st
	}
	if st := stat("home"); st.Mode&0o7777 != 0o700 || st.Uid != 5 || st.Mtim.Sec != later.Unix() {
		t.Errorf("home: %+v", st)
	}
	if st := stat("home/app"); st.Mode&0o7777 != 0o2750 || st.Uid != 1000 || st.Gid != 1001 || st.Mtim.Sec != tarTime.Unix() {
		t.Errorf("home/app: %+v", st)
	}
	a, b := stat("home/app/su"), stat("home/app/more")
	if a.Ino != b.Ino || a.Mode&0o7777 != 0o4755 || a.Uid != 70_000 {
		t.Errorf("hard links: %+v, %+v", a, b)
	}
	for attr, want := range map[string]string{"security.capability": capability, "user.note": "x", "trusted.overlay.opaque": ""} {
		value := make([]byte, 100)
		n, err := unix.Lgetxattr(filepath.Join(dir, "bin/ping"), attr, value)
		if want == "" && !errors.Is(err, unix.ENODATA) || want != "" && (err != nil || string(value[:n]) != want) {
			t.Errorf("%s: %q, %v", attr, value[:max(n, 0)], err)
		}
	}
}

// TestHostileLayers: layers that lie, escape, or need too much are refused, and nothing beside the tree changes.
func TestHostileLayers(t *testing.T) {
	t.Parallel()
	require.Root(t)
	limits := untarLimits{Bytes: 4 << 20, Entries: 1000, Stream: 8 << 20, Names: 1 << 14, LookUps: 1 << 20}
	lines := func(layers ...[]string) *stack { return stackOf(t, layers...) }
	blob := func(b []byte) *stack { s := &stack{}; s.add(b, b); return s }
	many := make([][]string, 30)
	for i := range many {
		for j := range 40 {
			many[i] = append(many[i], fmt.Sprintf("f x%d-%d", i, j))
		}
	}
	for name, c := range map[string]struct {
		stack *stack
		want  string
	}{
		"a path with ..":         {lines([]string{"f ../../etc/passwd x"}), ".."},
		"a whiteout of ..":       {lines([]string{"d etc", "f etc/.wh..."}), "not a name"},
		"a whiteout of .":        {lines([]string{"d etc", "f etc/.wh.."}), "not a name"},
		"a whiteout of nothing":  {lines([]string{"d etc", "f etc/.wh."}), "not a name"},
		"a hard link outside":    {lines([]string{"h a -> ../canary"}), ".."},
		"a hard link to nothing": {lines([]string{"l a -> /", "h b -> a/canary"}), "cannot be unpacked"},
		"a file below a file":    {lines([]string{"f a x", "f a/b x"}), "not a directory"},
		"links in a circle":      {lines([]string{"l a -> b", "l b -> a", "f a/x x"}), "too many links"},
		"a link that grows":      {lines([]string{"l a -> " + strings.Repeat("a/", 2000) + "b", "f a/x x"}), ""},
		"a file in place of root": {func() *stack {
			b := makeTar(t, []tar.Header{{Name: "./", Typeflag: tar.TypeSymlink, Linkname: "/"}}, nil)
			s := &stack{}
			s.add(b, b)
			return s
		}(), "root directory"},
		"entries of all layers": {lines(many...), "1000 entries"},
		"bytes of all layers": {func() *stack {
			s := &stack{}
			for range 3 { // each replaces what the one before has
				b := makeTar(t, []tar.Header{{Name: "a", Typeflag: tar.TypeReg}}, map[string]string{"a": strings.Repeat("x", 2<<20)})
				s.add(b, zipped(t, func(w io.Writer) { _, _ = w.Write(b) }))
			}
			return s
		}(), "4 MiB"},
		"a bomb that is dropped": {func() *stack {
			s := &stack{}
			for range 2 {
				b := makeTar(t, []tar.Header{{Name: "dev/a", Typeflag: tar.TypeReg}}, map[string]string{"dev/a": strings.Repeat("\x00", 5<<20)})
				s.add(b, zipped(t, func(w io.Writer) { _, _ = w.Write(b) }))
			}
			return s
		}(), "8 MiB"},
		"a bomb behind the end": {func() *stack {
			b := append(makeTar(t, nil, nil), make([]byte, 9<<20)...)
			s := &stack{}
			s.add(b, zipped(t, func(w io.Writer) { _, _ = w.Write(b) }))
			return s
		}(), "8 MiB"},
		"a bomb of zstd": {func() *stack {
			b := append(makeTar(t, nil, nil), make([]byte, 64<<20)...)
			e, err := zstd.NewWriter(nil, zstd.WithWindowSize(8<<20))
			if err != nil {
				t.Fatal(err)
			}
			s := &stack{}
			s.add(b, e.EncodeAll(b, nil))
			return s
		}(), "8 MiB"},
		"a window of zstd": {blob([]byte("\x28\xb5\x2f\xfd\x00\xff\x00\x00\x00\x00\x00\x00")), ""},
		"no layer":         {blob([]byte("some text that is no tar, and is longer than a block of it would be" + strings.Repeat(".", 512))), "cannot be read"},
		"half a layer": {func() *stack {
			s := stackOf(t, []string{"f a x"})
			b := s.blobs[s.layers[0].Digest]
			h := &stack{}
			h.add(nil, b[:len(b)/2])
			return h
		}(), "cannot be read"},
		"another content": {func() *stack {
			s := stackOf(t, []string{"f a x"}, []string{"f b x"})
			s.layers[1].Content = s.layers[0].Content
			return s
		}(), "layer 2 of 2: its content"},
		"a shorter layer in the store": {func() *stack { s := stackOf(t, []string{"f a x"}); s.layers[0].SizeBytes += 10; return s }(), ""},
		"another layer in the store, with the same content": {func() *stack {
			s := stackOf(t, []string{"f a x"}, []string{"f b x"})
			s.blobs[s.layers[0].Digest] = bytes.Clone(s.blobs[s.layers[0].Digest])
			s.blobs[s.layers[0].Digest][4] ^= 1 // the time in the header of gzip
			return s
		}(), "damaged"},
		"names of directories": {func() *stack {
			var l []string
			for i := range 100 {
				l = append(l, fmt.Sprintf("d %s%d", strings.Repeat("x", 200), i))
			}
			return stackOf(t, l)
		}(), "paths of directories"},
		"a deep path": {lines([]string{"d " + strings.Repeat("d/", 1000)}), "deep"},
		"parents over long links": {func() *stack {
			l := []string{"d a"}
			for i := range 38 {
				l = append(l, fmt.Sprintf("l l%d -> %sl%d", i, strings.Repeat("a/../", 800), i+1))
			}
			for i := range 200 { // of two parents, because the last one is remembered
				l = append(l, fmt.Sprintf("f l0/x%d/f x", i%2))
			}
			return stackOf(t, append(l, "d l38"))
		}(), "look-ups"},
		"deep links": {func() *stack {
			deep := strings.Repeat("d/", 200)
			return stackOf(t, []string{"d " + deep, "l a -> " + deep, "d a/" + deep})
		}(), "deep"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := c.stack
			dir, untouched := staging(t)
			err := untarLayers(t.Context(), s.layers, s.open, dir, limits)
			untouched()
			if err == nil || !strings.Contains(err.Error(), c.want) || core.CodeOf(err) != CodeInvalidTar {
				t.Errorf("%v (%s), want %q", err, core.CodeOf(err), c.want)
			}
		})
	}
}

// TestManyLayers: as many layers as an image may have are unpacked, and one pull's request to the helper has room for them.
func TestManyLayers(t *testing.T) {
	t.Parallel()
	require.Root(t)
	lines := make([][]string, 512)
	for i := range lines {
		lines[i] = []string{fmt.Sprintf("f x%d y", i), fmt.Sprintf("f .wh.x%d", i-1)}
	}
	s := stackOf(t, lines...)
	dir, _ := staging(t)
	if err := untarLayers(t.Context(), s.layers, s.open, dir, defaultUntarLimits); err != nil {
		t.Fatal(err)
	}
	if got := slices.Collect(maps.Keys(tree(t, dir))); len(got) != 1 || got[0] != "x511" {
		t.Errorf("left: %v", got)
	}
}

// TestRepeatedWhiteouts: a layer that removes one directory again and again costs as much as one that removes it once.
func TestRepeatedWhiteouts(t *testing.T) {
	t.Parallel()
	require.Root(t)
	var lines []string
	for i := range 400 {
		lines = append(lines, fmt.Sprintf("f d/x%d y", i))
	}
	for range 400 {
		lines = append(lines, "f .wh.d", "f d/.wh..wh..opq")
	}
	s := stackOf(t, []string{"f d/old y"}, lines)
	dir, _ := staging(t)
	limits := defaultUntarLimits
	limits.LookUps = 4000
	if err := untarLayers(t.Context(), s.layers, s.open, dir, limits); err != nil {
		t.Fatal(err)
	}
	if got := tree(t, dir); len(got) != 401 || got["d/old"] != "" {
		t.Errorf("left: %d paths, %q", len(got), got["d/old"])
	}
}

// TestLayersCanceled: the end of the caller ends the helper, also while it waits for a layer.
func TestLayersCanceled(t *testing.T) {
	t.Parallel()
	require.Root(t)
	s := stackOf(t, []string{"f a x"})
	silent, hold := io.Pipe()
	defer hold.Close()
	ctx, cancel := context.WithCancel(t.Context())
	open := func(images.Layer) (io.ReadCloser, error) {
		cancel()
		return silent, nil
	}
	dir, _ := staging(t)
	if err := untarLayers(ctx, s.layers, open, dir, defaultUntarLimits); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
