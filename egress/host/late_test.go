package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// fill takes all room of a file system. The returned function gives it back.
func fill(t *testing.T, dir string) (empty func()) {
	t.Helper()
	path := filepath.Join(dir, "filler")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for block := make([]byte, 64<<10); err == nil; {
		_, err = f.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDiskFull: flows and tallies that end while the disk is full are recorded when it has room again, with exact
// counts, and all reserved room is released.
func TestDiskFull(t *testing.T) {
	require.Root(t)
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=4m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	s := spoolIn(t, dir, 64<<20)
	d := newDenials(s, time.Hour)
	flow := func(i int) core.Flow {
		f := denial(i, "b.example", "")
		f.ID, f.SandboxID, f.Outcome = fmt.Sprint("other", i), "sbx_2", core.FlowAllowed
		return f
	}
	const flows, denied = 200, 500
	for i := range flows {
		if err := d.Begin(flow(i)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range denied {
		if err := d.Begin(denial(i, fmt.Sprintf("h%d.example", i%30), "no")); err != nil {
			t.Fatal(err)
		}
	}
	empty := fill(t, dir)
	for i := range flows {
		f := flow(i)
		f.Ended = f.At
		d.End(f)
	}
	d.end("")
	if err := d.Begin(flow(flows)); core.CodeOf(err) != core.CodeDiskFull && !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("a flow is begun on a full disk: %v", err)
	}
	if err := d.Begin(denial(denied, "c.example", "no")); err == nil {
		t.Error("a denied flow is recorded on a full disk")
	}
	empty()
	d.tidy(time.Now())
	if len(s.room) != 0 || s.reserved != 0 || len(s.open) != 0 || len(s.tallies) != 0 || len(s.slots.used) != 0 {
		t.Errorf("left: %d reservations of %d bytes, %d open flows, %d tallies, %d counters", len(s.room), s.reserved, len(s.open), len(s.tallies), len(s.slots.used))
	}
	list := reported(t, s)
	all, by := sum(list)
	ended := 0
	for _, f := range list {
		if f.SandboxID == "sbx_2" && !f.Ended.IsZero() {
			ended++
		}
	}
	if all-by["b.example"] != denied || ended != flows {
		t.Errorf("%d of %d denied flows are reported, and the ends of %d of %d flows", all-by["b.example"], denied, ended, flows)
	}
	if err := d.Begin(flow(flows)); err != nil {
		t.Errorf("a flow with room: %v", err)
	}
}

// TestAsideIsBounded: unreadable segments are set aside only within the bound, and none of them blocks the other
// segments.
func TestAsideIsBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for round := range 3 { // three starts of the process
		for i := range asideFiles {
			if err := os.Mkdir(filepath.Join(dir, fmt.Sprintf(nameForm, 1000+100*round+i)), 0o700); err != nil { // a directory cannot be read as a segment
				t.Fatal(err)
			}
		}
		s := spoolIn(t, dir, 64<<20)
		if found := s.aside.found[unreadable]; found != asideFiles {
			t.Errorf("%d segments are counted, want %d", found, asideFiles)
		}
		if err := s.Begin(denial(round, "a.example", "no")); err != nil {
			t.Error(err)
		}
		if err := s.close(); err != nil {
			t.Fatal(err)
		}
	}
	if n, _ := setAside(t, dir); n != asideFiles {
		t.Errorf("%d files are set aside, want %d", n, asideFiles)
	}
	big := t.TempDir()
	s := spoolIn(t, big, 64<<20)
	const size = 9 << 20
	for i := range 10 {
		name := fmt.Sprintf(nameForm, 1000+i)
		if err := errors.Join(os.WriteFile(filepath.Join(big, name), nil, 0o600), os.Truncate(filepath.Join(big, name), size)); err != nil {
			t.Fatal(err)
		}
		if err := s.aside.segment(name, syscall.EIO); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(filepath.Join(big, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a segment that cannot be read is still there: %v", err)
		}
	}
	if n, bytes := setAside(t, big); n != asideBytes/size || bytes > asideBytes {
		t.Errorf("%d files with %d bytes are set aside, may have %d", n, bytes, asideBytes)
	}
	if s.aside.found[unreadable] != 10 {
		t.Errorf("%d are counted", s.aside.found[unreadable])
	}
}

func setAside(t *testing.T, dir string) (n int, bytes int64) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		if info, err := e.Info(); err == nil && strings.HasPrefix(e.Name(), asideName) {
			n, bytes = n+1, bytes+info.Size()
		}
	}
	return n, bytes
}
