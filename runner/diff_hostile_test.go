package runner

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/ext4/ext4test"
	"github.com/coppice-dev/coppice/runner/rootimage/erofstest"
	"github.com/coppice-dev/coppice/runner/roots"
)

// hostileImages are root file systems that a tenant may have brought. Each has a directory big, which the overlay of one checkpoint
// hides, so that all of it is listed.
func hostileImages() map[string][]byte {
	link := func(name string, file int) erofstest.Entry {
		return erofstest.Entry{Name: name, File: file, Type: erofstest.Dir}
	}
	dir := func(entries ...erofstest.Entry) erofstest.File {
		return erofstest.File{Mode: erofstest.ModeDir, Entries: entries}
	}
	many := dir()
	for i := range 200 {
		many.Entries = append(many.Entries, erofstest.Entry{Name: fmt.Sprintf("%08d", i), File: 1, Type: erofstest.Regular})
	}
	wide := many
	wide.Times = 64 << 20 / 4096
	cycle := dir(link("big", 1))
	for i := range 100 {
		cycle.Entries = append(cycle.Entries, link(fmt.Sprintf("%03d", i), 1))
	}
	ladder := []erofstest.File{dir(link("big", 1))} // each directory has the next one many times
	for n := 1; n < 30; n++ {
		rung := dir()
		for i := range 50 {
			rung.Entries = append(rung.Entries, link(fmt.Sprintf("%03d", i), n+1))
		}
		ladder = append(ladder, rung)
	}
	huge := erofstest.File{Mode: erofstest.ModeRegular, Data: []byte("x"), Size: 1 << 62}
	return map[string][]byte{
		"a directory of 64 MiB":      erofstest.Image(dir(link("big", 1)), wide),
		"a directory in itself":      erofstest.Image(dir(link("big", 1)), cycle),
		"directories within others":  erofstest.Image(append(ladder, dir())...),
		"a file of 2^62 bytes":       erofstest.Image(dir(link("big", 1)), dir(erofstest.Entry{Name: "huge", File: 2, Type: erofstest.Regular}), huge),
		"a directory beyond the end": erofstest.Image(dir(link("big", 1)), erofstest.File{Mode: erofstest.ModeDir, Size: 16 << 20}),
	}
}

// TestDiffOfHostileImages: a comparison of checkpoints whose image is hostile gives a page that says what could not be read. It
// costs the runner little memory, and a comparison of other checkpoints meanwhile is not affected.
func TestDiffOfHostileImages(t *testing.T) {
	good := newShelf(t)
	x, y := good.put(1, "one", unchanged, nil), good.put(1, "two", unchanged, nil)
	good.open()
	for name, image := range hostileImages() {
		t.Run(name, func(t *testing.T) {
			s := newShelf(t)
			a, b := s.put(1, "one", unchanged, nil), s.put(1, "one", unchanged, nil)
			s.open()
			if err := os.WriteFile(s.roots.Path(roots.Own(s.image)), image, 0o600); err != nil {
				t.Fatal(err)
			}
			ext4test.Change(t, s.checkpoints.Path(b, checkpoints.OverlayFile), "cd upper", "mknod big c 0 0")
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			start := time.Now()
			beside := make(chan error, 1)
			go func() {
				p, err := good.Diff(t.Context(), x, runnerapi.Diff{To: y, Limit: 10})
				if err == nil && (len(p.Files) != 2 || p.Unreadable > 0) {
					err = fmt.Errorf("another comparison: %+v", p)
				}
				beside <- err
			}()
			page, err := s.Diff(t.Context(), a, runnerapi.Diff{To: b, Limit: runnerapi.MaxDiffFiles})
			if err := errors.Join(err, <-beside); err != nil {
				t.Fatal(err)
			}
			runtime.ReadMemStats(&after)
			if len(page.Files) == 0 || string(page.Files[0].Path) != "/big" || page.Files[0].Change != "removed" || page.Unreadable == 0 {
				t.Errorf("%d files, %d unreadable", len(page.Files), page.Unreadable)
			}
			if grown := (after.TotalAlloc - before.TotalAlloc) >> 20; grown > 64 {
				t.Errorf("the runner allocated %d MiB", grown)
			}
			if took := time.Since(start); took > 2*time.Minute {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// TestDiffOfHostileDisks does that with disks which a guest wrote around its kernel.
func TestDiffOfHostileDisks(t *testing.T) {
	const table, blocks = 34 * 4096, 8 * 4096
	const upper, entries = table + (12-1)*256, blocks // of upper/ on ext4test.Tiny
	le := binary.LittleEndian
	for name, c := range map[string]struct {
		change func(b []byte)
		want   core.Code // empty: a page that says what was unreadable
	}{
		"a directory of 64 MiB":  {func(b []byte) { le.PutUint32(b[upper+4:], 64<<20) }, ""},
		"a directory in itself":  {func(b []byte) { le.PutUint32(b[entries+24:], 12) }, ""},
		"2^32 inodes":            {func(b []byte) { le.PutUint32(b[1024:], 1<<32-1) }, core.CodeDiskUnreadable},
		"2^32 blocks":            {func(b []byte) { le.PutUint32(b[1024+4:], 1<<32-1) }, core.CodeDiskUnreadable},
		"inodes of 64 KiB":       {func(b []byte) { le.PutUint16(b[1024+0x58:], 1<<15) }, core.CodeDiskUnreadable},
		"overlapping extents":    {func(b []byte) { overlap(b[upper+0x28:]) }, ""},
		"a tree of extents":      {func(b []byte) { le.PutUint16(b[upper+0x28+6:], 5) }, ""},
		"more extents than room": {func(b []byte) { le.PutUint16(b[upper+0x28+2:], 1<<16-1) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := newShelf(t)
			a, b := s.put(1, "one", unchanged, nil), s.put(1, "one", unchanged, nil)
			s.open()
			good, bad := ext4test.Tiny(t), ext4test.Tiny(t)
			c.change(bad)
			if err := errors.Join(os.WriteFile(s.checkpoints.Path(a, checkpoints.OverlayFile), good, 0o600), os.WriteFile(s.checkpoints.Path(b, checkpoints.OverlayFile), bad, 0o600)); err != nil {
				t.Fatal(err)
			}
			page, err := s.Diff(t.Context(), a, runnerapi.Diff{To: b, Limit: 1000})
			switch {
			case c.want != "":
				if core.CodeOf(err) != c.want || core.CategoryOf(err) != core.FailedPrecondition {
					t.Errorf("%v, want %s", err, c.want)
				}
			case err != nil || page.Unreadable == 0:
				t.Errorf("%+v, %v", page, err)
			}
		})
	}
}

// overlap makes an inode's extents two that begin at the same block of the file.
func overlap(b []byte) {
	le := binary.LittleEndian
	le.PutUint16(b[2:], 2)
	copy(b[24:36], b[12:24])
}
