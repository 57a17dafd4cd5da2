package build

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/confine"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// TestArchiveSource: an archive is a regular file. Nothing else is opened: a FIFO would wait for ever, and opening a
// device node can have any effect.
func TestArchiveSource(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := errors.Join(
		unix.Mkfifo(at("fifo"), 0o600), unix.Mknod(at("zero"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5))),
		unix.Mknod(at("block"), unix.S_IFBLK|0o600, int(unix.Mkdev(7, 200))), os.Symlink("zero", at("link")), os.Mkdir(at("dir"), 0o700),
		os.WriteFile(at("file"), []byte("content"), 0o600), os.Symlink("file", at("good")),
	); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"fifo", "zero", "block", "link", "dir", "none"} {
		ended := make(chan error, 1)
		go func() {
			b := &builder{o: Options{FromTar: at(name)}, source: images.SourceTar}
			_, err := b.rootInput(t.Context(), resolution{})
			if err == nil {
				_, err = b.tarTree(t.Context(), at("tree of "+name))
			}
			ended <- err
		}()
		select {
		case err := <-ended:
			if core.CodeOf(err) != CodeInvalidTar {
				t.Errorf("%s: %v, want %s", name, err, CodeInvalidTar)
			}
		case <-time.After(5 * time.Minute):
			t.Errorf("%s: it hangs", name)
		}
	}
	for _, name := range []string{"file", "good"} {
		f, err := openArchive(at(name))
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(f); err != nil || string(b) != "content" {
			t.Errorf("%s: %q, %v", name, b, err)
		}
		_ = f.Close()
	}
}

// TestHostileTree: whatever an archive has in the place of files that a build reads or lists, the build does not wait,
// read a device or follow a link out of the tree.
func TestHostileTree(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeDir} }
	fifo := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeFifo} }
	zero := func(name string) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 5}
	}
	for name, entries := range map[string][]tar.Header{
		"FIFOs":   {dir("etc/"), fifo("etc/fstab"), fifo("etc/ssh"), fifo("etc/cron.d"), fifo("var/lib/systemd"), fifo("var/lib/dbus/machine-id"), fifo("etc/machine-id")},
		"devices": {dir("etc/"), zero("etc/fstab"), zero("etc/ssh"), zero("etc/cron.d"), zero("var/lib/dhcp"), zero("etc/hostname")},
		"links":   {dir("etc/"), {Name: "etc/fstab", Typeflag: tar.TypeSymlink, Linkname: "/dev/zero"}, {Name: "etc/ssh", Typeflag: tar.TypeSymlink, Linkname: "../../.."}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tree, untouched := staging(t)
			if _, err := untar(t.Context(), bytes.NewReader(makeTar(t, entries, nil)), tree, defaultUntarLimits); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() {
				root, err := os.OpenRoot(tree)
				if err == nil {
					err = prepareTree(root, sessionDefaults{})
					_ = root.Close()
				}
				if err == nil {
					_, err = Lint(tree)
				}
				ended <- err
			}()
			select {
			case err := <-ended:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(5 * time.Minute):
				t.Error("it hangs")
			}
			untouched()
		})
	}
}

func zipped(t *testing.T, write func(io.Writer)) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	write(z)
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestTarBombs: small archives that need much memory, time or disk are refused, and cost the builder little.
func TestTarBombs(t *testing.T) {
	require.Root(t)
	header := func(w *tar.Writer, h tar.Header) {
		h.Mode, h.ModTime = 0o755, tarTime
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	long := strings.Repeat("x", 200)
	limits := untarLimits{Bytes: 16 << 20, Entries: 1 << 20, Stream: 32 << 20, Names: 1 << 18, LookUps: 1 << 20}
	for name, c := range map[string]struct {
		write func(io.Writer)
		want  string
	}{
		"zeros in a file that is dropped": {func(w io.Writer) {
			a := tar.NewWriter(w)
			header(a, tar.Header{Name: "dev/zeros", Typeflag: tar.TypeReg, Size: 1 << 50})
			_, _ = io.CopyN(a, zeros{}, 40<<20)
		}, "32 MiB"},
		"zeros in a file": {func(w io.Writer) {
			a := tar.NewWriter(w)
			header(a, tar.Header{Name: "usr/zeros", Typeflag: tar.TypeReg, Size: 20 << 20})
			_, _ = io.CopyN(a, zeros{}, 20<<20)
		}, "16 MiB"},
		"names of directories": {func(w io.Writer) {
			a := tar.NewWriter(w)
			for i := range 2_000 {
				header(a, tar.Header{Name: fmt.Sprintf("usr/%s%d/", long, i%50), Typeflag: tar.TypeDir})
			}
		}, "paths of directories"},
		"records of a directory": {func(w io.Writer) { // each header has a megabyte
			a := tar.NewWriter(w)
			for i := range 25 {
				header(a, tar.Header{Name: fmt.Sprintf("usr/%d/", i), Typeflag: tar.TypeDir, Format: tar.FormatPAX, PAXRecords: map[string]string{"COPPICE.x": strings.Repeat("x", 1_000_000)}})
			}
			_ = a.Close()
		}, ""},
		"a deep path": {func(w io.Writer) {
			a := tar.NewWriter(w)
			header(a, tar.Header{Name: strings.Repeat("d/", 1000), Typeflag: tar.TypeDir})
		}, "deep"},
		"attributes": {func(w io.Writer) {
			a := tar.NewWriter(w)
			records := map[string]string{}
			for i := range 100 {
				records[fmt.Sprintf("SCHILY.xattr.user.%d", i)] = "x"
			}
			header(a, tar.Header{Name: "usr/x", Typeflag: tar.TypeReg, Format: tar.FormatPAX, PAXRecords: records})
		}, "attributes"},
	} {
		t.Run(name, func(t *testing.T) {
			archive := zipped(t, c.write)
			tree, untouched := staging(t)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := untar(t.Context(), bytes.NewReader(archive), tree, limits)
			runtime.ReadMemStats(&after)
			untouched()
			if c.want == "" && err != nil || c.want != "" && (core.CodeOf(err) != CodeInvalidTar || !strings.Contains(core.MessageOf(err), c.want)) {
				t.Errorf("err = %v, want %q", err, c.want)
			}
			if grown := (after.TotalAlloc - before.TotalAlloc) >> 20; grown > 8 {
				t.Errorf("%d KiB of archive: the builder allocated %d MiB", len(archive)>>10, grown)
			}
		})
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

// TestEndlessArchive: data after an archive's end is not read for ever, and an input that never comes is not waited
// for.
func TestEndlessArchive(t *testing.T) {
	t.Parallel()
	require.Root(t)
	archive := makeTar(t, []tar.Header{{Name: "usr/", Typeflag: tar.TypeDir}}, nil)
	tree, _ := staging(t)
	if _, err := untar(t.Context(), io.MultiReader(bytes.NewReader(archive), zeros{}), tree, defaultUntarLimits); core.CodeOf(err) != CodeInvalidTar || !strings.Contains(err.Error(), "after its end") {
		t.Errorf("an archive without end: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	silent, hold := io.Pipe()
	defer hold.Close()
	tree, _ = staging(t)
	ended := make(chan error, 1)
	go func() {
		_, err := untar(ctx, silent, tree, defaultUntarLimits)
		ended <- err
	}()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("an input that never comes: %v", err)
	}
}

func TestUnpackErrors(t *testing.T) {
	t.Parallel()
	for _, err := range []error{
		&confine.LimitError{Task: untarTask, Limit: confine.LimitMemory, Bound: "512 MiB"}, &confine.CrashError{Task: untarTask, How: "panic"},
		&confine.TaskError{Code: CodeInvalidTar, Message: "entry 1"},
	} {
		if got := unpackError(err); core.CodeOf(got) != CodeInvalidTar || core.CategoryOf(got) != core.Invalid {
			t.Errorf("%v became %v", err, got)
		}
	}
	if got := unpackError(&confine.TaskError{Code: "MADE_UP", Message: "x"}); core.CodeOf(got) != core.CodeInternal {
		t.Errorf("a code that no unpacking has became %v", got)
	}
}

// FuzzUnpack unpacks archives with changed bytes, in this process. Nothing outside of the tree changes.
func FuzzUnpack(f *testing.F) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []tar.Header{
		{Name: "usr/", Typeflag: tar.TypeDir},
		{Name: "usr/a", Typeflag: tar.TypeReg, Size: 1},
		{Name: "usr/l", Typeflag: tar.TypeSymlink, Linkname: "../.."},
		{Name: "usr/h", Typeflag: tar.TypeLink, Linkname: "usr/a"},
		{Name: "usr/l/b", Typeflag: tar.TypeReg},
		{Name: "usr/f", Typeflag: tar.TypeFifo},
	} {
		h.Mode = 0o755
		if err := w.WriteHeader(&h); err != nil {
			f.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := w.Write([]byte("x")); err != nil {
				f.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, archive []byte) {
		outer := t.TempDir()
		dir := filepath.Join(outer, "tree")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		_ = unpack(t.Context(), bytes.NewReader(archive), dir, untarLimits{Bytes: 1 << 20, Entries: 100, Stream: 4 << 20, Names: 1 << 16, LookUps: 1 << 20}) // it may be refused
		entries, err := os.ReadDir(outer)
		if err != nil || len(entries) != 1 {
			t.Fatalf("beside the tree: %v, %v", entries, err)
		}
	})
}
