package diskdiff

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/coppice-dev/coppice/runner/ext4"
	"github.com/coppice-dev/coppice/runner/ext4/ext4test"
)

// small is an image, in memory.
var small = fstest.MapFS{
	"a": {Data: []byte("other")}, "gone": {Data: []byte("x")}, "d/old": {}, "etc/passwd": {Data: []byte("root")}, "etc/link": {Data: []byte("passwd"), Mode: os.ModeSymlink | 0o777},
}

func stored(tb testing.TB, name string, b []byte) *os.File {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), name)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		tb.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = f.Close() })
	return f
}

// everything compares in both directions, page by page, and returns the paths and how much was unreadable. It fails the test when that
// does not end, or when what it returns cannot be.
func everything(tb testing.TB, a, b *os.File, limit int) (paths []string, unreadable int, err error) {
	tb.Helper()
	for range 2 {
		var last []byte
		for pages := 0; ; pages++ {
			p, err := Compare(tb.Context(), Request{A: a, B: b, Lower: small, After: last, Limit: limit})
			if err != nil {
				return nil, 0, err
			}
			unreadable += p.Unreadable
			for _, c := range p.Changes {
				if len(c.Path) > maxPath+260 || bytes.IndexByte(c.Path, 0) >= 0 || c.Size < 0 || c.SizeBefore < 0 {
					tb.Fatalf("%+v", c)
				}
				paths = append(paths, string(c.Path))
			}
			if len(p.Next) == 0 {
				break
			}
			if bytes.Equal(p.Next, last) || pages > 10_000 {
				tb.Fatalf("page %d gets no further than %q", pages, last)
			}
			last = p.Next
		}
		a, b = b, a
	}
	return paths, unreadable, nil
}

const (
	tinyTable = 34 * 4096
	tinyUpper = tinyTable + (12-1)*256
	tinyDir   = 8 * 4096 // the entries of upper/
)

func TestHostile(t *testing.T) {
	t.Parallel()
	good := ext4test.Tiny(t)
	le := binary.LittleEndian
	for name, x := range map[string]struct {
		change func(b []byte)
		bad    bool // something is unreadable
	}{
		"nothing":                {func([]byte) {}, false},
		"a directory in itself":  {func(b []byte) { le.PutUint32(b[tinyDir+24:], 12) }, true},
		"a directory twice":      {func(b []byte) { le.PutUint32(b[tinyDir+24:], 15) }, true},
		"the root in a file":     {func(b []byte) { le.PutUint32(b[tinyDir+24:], 2) }, true},
		"a name of no inode":     {func(b []byte) { le.PutUint32(b[tinyDir+24:], 4000) }, true},
		"a directory of rubbish": {func(b []byte) { copy(b[tinyDir:], strings.Repeat("\xff", 4096)) }, true},
		"no upper":               {func(b []byte) { le.PutUint16(b[tinyUpper:], 0o100644) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := bytes.Clone(good)
			x.change(b)
			for _, limit := range []int{1, 100} {
				_, unreadable, err := everything(t, stored(t, "a", good), stored(t, "b", b), limit)
				if err != nil || unreadable > 0 != x.bad {
					t.Errorf("in pages of %d: %d unreadable, %v", limit, unreadable, err)
				}
			}
		})
	}
	for name, change := range map[string]func(b []byte){
		"no file system": func(b []byte) { clear(b) },
		"a journal":      func(b []byte) { b[1024+0x60] |= 4 },
		"no root":        func(b []byte) { clear(b[tinyTable+256:][:256]) },
	} {
		b := bytes.Clone(good)
		change(b)
		_, _, err := everything(t, stored(t, "a", good), stored(t, "b", b), 10)
		_, isDamage := errors.AsType[*ext4.DamagedError](err)
		_, isForeign := errors.AsType[*ext4.UnsupportedError](err)
		if !isDamage && !isForeign {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzCompare compares a real disk with one in which places were changed: four bytes of offset, one of length and the new bytes each.
func FuzzCompare(f *testing.F) {
	good := ext4test.Tiny(f)
	patch := func(at uint32, b ...byte) []byte {
		return append(append(binary.LittleEndian.AppendUint32(nil, at), byte(len(b))), b...)
	}
	f.Add([]byte(nil))
	f.Add(patch(tinyDir+24, 12, 0, 0, 0))
	f.Add(patch(tinyUpper+4, 0, 32))
	f.Add(append(patch(tinyDir+24, 15), patch(tinyDir+24+12, 2)...))
	f.Fuzz(func(t *testing.T, changes []byte) {
		b := bytes.Clone(good)
		for len(changes) >= 5 {
			at, n := int(binary.LittleEndian.Uint32(changes))%len(b), min(int(changes[4]), len(changes)-5)
			copy(b[at:], changes[5:5+n])
			changes = changes[5+n:]
		}
		start := time.Now()
		_, _, err := everything(t, stored(t, "a", good), stored(t, "b", b), 3)
		if err != nil {
			_, isDamage := errors.AsType[*ext4.DamagedError](err)
			_, isForeign := errors.AsType[*ext4.UnsupportedError](err)
			if !isDamage && !isForeign {
				t.Error(err)
			}
		}
		if took := time.Since(start); took > 2*time.Minute {
			t.Errorf("it took %v", took)
		}
	})
}
