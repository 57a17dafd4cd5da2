package rootimage

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"path"
	"runtime"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/runner/rootimage/erofstest"
)

func image(files ...erofstest.File) []byte { return erofstest.Image(files...) }

func dir(entries ...erofstest.Entry) erofstest.File {
	return erofstest.File{Mode: erofstest.ModeDir, Entries: entries}
}

func file(text string) erofstest.File {
	return erofstest.File{Mode: erofstest.ModeRegular, Data: []byte(text)}
}

func named(name string, file int, kind uint8) erofstest.Entry {
	return erofstest.Entry{Name: name, File: file, Type: kind}
}

func small() []byte {
	return image(
		dir(named("a", 1, erofstest.Regular), named("d", 2, erofstest.Dir), named("l", 3, erofstest.Symlink)),
		file("hello"), dir(named("b", 1, erofstest.Regular)), erofstest.File{Mode: erofstest.ModeSymlink, Data: []byte("d/b")},
	)
}

func TestRead(t *testing.T) {
	t.Parallel()
	f, err := Open(bytes.NewReader(small()))
	if err != nil {
		t.Fatal(err)
	}
	list, err := f.ReadDir(".")
	if err != nil || len(list) != 3 || list[0].Name() != "a" || list[1].Name() != "d" || list[2].Name() != "l" {
		t.Errorf("%v, %v", list, err)
	}
	b, err := fs.ReadFile(f, "l")
	if err != nil || string(b) != "hello" {
		t.Errorf("%q, %v", b, err)
	}
	if target, err := f.ReadLink("l"); err != nil || target != "d/b" {
		t.Errorf("%q, %v", target, err)
	}
	if _, err := f.Lstat("x"); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

// many is a directory with n different names.
func many(n int) erofstest.File {
	d := dir()
	for i := range n {
		d.Entries = append(d.Entries, named(fmt.Sprintf("%08d", i), 0, erofstest.Regular))
	}
	return d
}

// TestHostile: what no root file system has is refused, and without much memory.
func TestHostile(t *testing.T) {
	big := many(200)
	big.Times = 64 << 20 / 4096
	eachTwice := many(200)
	eachTwice.Times = 2
	long := file("x")
	long.Size = 1 << 60
	negative := file("x")
	negative.Size = math.MaxUint64
	for name, c := range map[string]struct {
		image []byte
		read  func(*FS) error
	}{
		"a directory of 64 MiB":         {image(dir(named("d", 1, erofstest.Dir)), big), func(f *FS) error { _, err := f.ReadDir("d"); return err }},
		"a directory of too many names": {image(many(MaxEntries + 1)), func(f *FS) error { _, err := f.ReadDir("."); return err }},
		"names twice":                   {image(dir(named("d", 1, erofstest.Dir)), eachTwice), func(f *FS) error { _, err := f.ReadDir("d"); return err }},
		"a name with a slash":           {image(dir(named("a/b", 0, erofstest.Dir))), func(f *FS) error { _, err := f.ReadDir("."); return err }},
		"a file of an exbibyte":         {image(dir(named("f", 1, erofstest.Regular)), long), func(f *FS) error { _, err := f.Lstat("f"); return err }},
		"a file of less than nothing":   {image(dir(named("f", 1, erofstest.Regular)), negative), func(f *FS) error { _, err := f.Lstat("f"); return err }},
		"a file beyond the image":       {image(dir(named("f", 1, erofstest.Regular)), erofstest.File{Mode: erofstest.ModeRegular, Data: []byte("x"), Size: 1 << 20}), func(f *FS) error { _, err := fs.ReadFile(f, "f"); return err }},
		"a directory beyond the image":  {image(dir(named("d", 1, erofstest.Dir)), erofstest.File{Mode: erofstest.ModeDir, Size: 1 << 20}), func(f *FS) error { _, err := f.ReadDir("d"); return err }},
		"a link to itself":              {image(dir(named("l", 1, erofstest.Symlink)), erofstest.File{Mode: erofstest.ModeSymlink, Data: []byte("l")}), func(f *FS) error { _, err := f.Open("l"); return err }},
		"a link of a mebibyte":          {image(dir(named("l", 1, erofstest.Symlink)), erofstest.File{Mode: erofstest.ModeSymlink, Data: bytes.Repeat([]byte("l/"), 1<<19)}), func(f *FS) error { _, err := f.ReadLink("l"); return err }},
		"no image":                      {make([]byte, 8192), nil},
		"less than a superblock":        {make([]byte, 1025), nil},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		f, err := Open(bytes.NewReader(c.image))
		if err == nil && c.read != nil {
			err = c.read(f)
		}
		runtime.ReadMemStats(&after)
		if _, ok := errors.AsType[*DamagedError](err); !ok {
			t.Errorf("%s: %v, want damage", name, err)
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 150<<20 {
			t.Errorf("%s: %d MiB were allocated", name, grown>>20)
		}
	}
}

type broken struct{ io.ReaderAt }

var errDisk = errors.New("the disk is broken")

func (b broken) ReadAt(p []byte, off int64) (int, error) {
	if off > 4096 {
		return 0, errDisk
	}
	return b.ReaderAt.ReadAt(p, off)
}

// TestHostError: an error of the host is not damage, which would be blamed on the image.
func TestHostError(t *testing.T) {
	t.Parallel()
	f, err := Open(broken{bytes.NewReader(small())})
	if err == nil {
		_, err = f.ReadDir(".")
	}
	if !errors.Is(err, errDisk) {
		t.Error(err)
	}
}

// FuzzRead walks an image in which places were changed: four bytes of offset, one of length and the new bytes each.
func FuzzRead(f *testing.F) {
	good := small()
	patch := func(at uint32, b ...byte) []byte {
		return append(append(binary.LittleEndian.AppendUint32(nil, at), byte(len(b))), b...)
	}
	f.Add([]byte(nil))
	f.Add(patch(2*4096+8, 0, 0, 0, 4))
	f.Add(patch(2*4096, 9))
	f.Add(patch(6*4096+8, 12, 0))
	f.Add(patch(1024+12, 16))
	f.Fuzz(func(t *testing.T, changes []byte) {
		b := bytes.Clone(good)
		for len(changes) >= 5 {
			at, n := int(binary.LittleEndian.Uint32(changes))%len(b), min(int(changes[4]), len(changes)-5)
			copy(b[at:], changes[5:5+n])
			changes = changes[5+n:]
		}
		start := time.Now()
		fsys, err := Open(bytes.NewReader(b))
		if err != nil {
			return
		}
		visits := 0
		walk(fsys, ".", &visits)
		if took := time.Since(start); took > 2*time.Minute {
			t.Errorf("it took %v", took)
		}
	})
}

// walk reads what it can, as far as a comparison would.
func walk(f *FS, name string, visits *int) {
	if *visits++; *visits > 100 {
		return
	}
	info, err := f.Lstat(name)
	if err != nil {
		return
	}
	switch {
	case info.IsDir():
		list, err := f.ReadDir(name)
		if err != nil {
			return
		}
		for _, e := range list {
			walk(f, path.Join(name, e.Name()), visits)
		}
	case info.Mode()&fs.ModeSymlink != 0:
		_, _ = f.ReadLink(name) // it ends
	default:
		if opened, err := f.Open(name); err == nil {
			_, _ = io.CopyN(io.Discard, opened, 1<<20) // it ends
			_ = opened.Close()                         // only read
		}
	}
}
