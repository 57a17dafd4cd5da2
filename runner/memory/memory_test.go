package memory

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

const childVariable = "MEMORY_TEST_CHILD"

func TestMain(m *testing.M) {
	if size := os.Getenv(childVariable); size != "" {
		child(size)
		return
	}
	os.Exit(m.Run())
}

// child is a stand-in for a VMM: it maps descriptor 3 privately, says where, and writes what it is ordered to.
func child(size string) {
	var n int
	_, _ = fmt.Sscan(size, &n)
	b, err := unix.Mmap(3, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))))
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var off, length, value int
		_, _ = fmt.Sscan(lines.Text(), &off, &length, &value)
		for i := range length {
			b[off+i] = byte(value + i)
		}
		fmt.Println("ok")
	}
}

// startChild starts one. write has it write length bytes from value on.
func startChild(t *testing.T, base *Base) (r Region, write func(off, length, value int), kill func()) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", childVariable, base.Size))
	cmd.ExtraFiles = []*os.File{base.File()}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	answers := bufio.NewReader(out)
	answer := func() string {
		l, err := answers.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(l)
	}
	ended := false
	kill = func() {
		if !ended {
			ended = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}
	t.Cleanup(kill)
	var addr uint64
	if _, err := fmt.Sscan(answer(), &addr); err != nil {
		t.Fatal(err)
	}
	return OnePart(cmd.Process.Pid, addr, base.Size), func(off, length, value int) {
		if _, err := fmt.Fprintln(in, off, length, value); err != nil {
			t.Fatal(err)
		}
		if got := answer(); got != "ok" {
			t.Fatal(got)
		}
	}, kill
}

// bothScans wants the same of both methods.
func bothScans(t *testing.T, r Region, want []Extent) {
	t.Helper()
	got, err := scan(r, scanPagemap)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("the page map has other private pages (-want +got):\n%s", diff)
	}
	if ScanMethod() != MethodPagemapScan {
		t.Log("this kernel has no PAGEMAP_SCAN: one method was tested")
		return
	}
	if got, err = scan(r, scanIoctl); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("PAGEMAP_SCAN has other private pages (-want +got):\n%s", diff)
	}
}

// TestLineage follows random machines over generations: what is captured, injected and rebased is what was written, whatever
// the way there.
func TestLineage(t *testing.T) {
	t.Parallel()
	for _, frozen := range []bool{false, true} {
		t.Run(fmt.Sprintf("frozen=%v", frozen), func(t *testing.T) {
			t.Parallel()
			const size = 2 << 20
			rng := newRand(t)
			store := newStore(t, frozen)
			base := zeroBase(t, store, size)
			m := newModel(make([]byte, size))
			r := mapPrivate(t, base.File(), size)
			for range 12 {
				before := content(t, base)
				randomWrites(rng, r, m, 40)
				bothScans(t, r.Region, m.extents())
				d := capture(t, r.Region)
				if diff := cmp.Diff(m.extents(), d.Extents); diff != "" {
					t.Fatalf("the delta has other extents:\n%s", diff)
				}
				if !bytes.Equal(content(t, base), before) {
					t.Fatal("the base has changed")
				}
				switch rng.IntN(3) {
				case 0: // a child on a base of its own
					base = rebase(t, store, base, d)
					if !bytes.Equal(content(t, base), m.bytes) {
						t.Fatal("the new base is not base and delta")
					}
					m = newModel(m.bytes)
					r = mapPrivate(t, base.File(), size)
				case 1: // a child on the same base
					r = mapPrivate(t, base.File(), size)
					if err := d.Inject(r.Region); err != nil {
						t.Fatal(err)
					}
				}
				if !bytes.Equal(r.bytes, m.bytes) {
					t.Fatal("the RAM is not what was written")
				}
			}
		})
	}
}

// TestOtherProcess does the same with the memory of a process that is not this one.
func TestOtherProcess(t *testing.T) {
	t.Parallel()
	const size = 8 << 20
	store := newStore(t, false)
	base := zeroBase(t, store, size)
	region, write, kill := startChild(t, base)
	write(PageSize+100, 3*PageSize, 1)
	write(size-1, 1, 9)
	bothScans(t, region, []Extent{{PageSize, 4 * PageSize}, {size - PageSize, PageSize}})
	d := capture(t, region)

	other, writeOther, _ := startChild(t, base)
	if err := d.Inject(other); err != nil {
		t.Fatal(err)
	}
	writeOther(0, 1, 42)
	bothScans(t, other, []Extent{{0, 5 * PageSize}, {size - PageSize, PageSize}})
	want := make([]byte, size)
	for i := range 3 * PageSize {
		want[PageSize+100+i] = byte(1 + i)
	}
	want[size-1], want[0] = 9, 42
	if got := content(t, rebase(t, store, base, capture(t, other))); !bytes.Equal(got, want) {
		t.Error("the memory of the child is not what it and its parent have written")
	}

	c, err := Prepare(region)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	kill()
	if err := c.Copy(); err == nil {
		t.Error("the memory of a process that has ended was copied")
	}
	if err := d.Inject(region); err == nil {
		t.Error("memory was injected into a process that has ended")
	}
	if _, err := Prepare(region); err == nil {
		t.Error("the memory of a process that has ended was scanned")
	}
}

// TestScattered has more ranges than a call of PAGEMAP_SCAN may return, and more than one of process_vm_readv takes.
func TestScattered(t *testing.T) {
	t.Parallel()
	const pages = 5000
	const size = 2 * pages * PageSize
	store := newStore(t, false)
	base := zeroBase(t, store, size)
	r := mapPrivate(t, base.File(), size)
	m := newModel(make([]byte, size))
	for i := range pages {
		b := []byte(fmt.Sprint("page ", i))
		copy(r.bytes[2*i*PageSize:], b)
		m.write(2*i*PageSize, b)
	}
	bothScans(t, r.Region, m.extents())
	d := capture(t, r.Region)
	if len(d.Extents) != pages {
		t.Errorf("the delta has %d extents, want %d", len(d.Extents), pages)
	}
	child := mapPrivate(t, base.File(), size)
	if err := d.Inject(child.Region); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(child.bytes, m.bytes) {
		t.Error("the child has other bytes")
	}
	bothScans(t, child.Region, m.extents())
}

// TestOutgrown writes more between the estimate and the pause than was prepared for.
func TestOutgrown(t *testing.T) {
	t.Parallel()
	const size = 4 * slack
	base := zeroBase(t, newStore(t, false), size)
	r := mapPrivate(t, base.File(), size)
	c, err := Prepare(r.Region)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for i := range r.bytes {
		r.bytes[i] = byte(i >> 10)
	}
	if err := c.Copy(); err != nil {
		t.Fatal(err)
	}
	if c.Bytes() != size || !bytes.Equal(c.Delta().data, r.bytes) {
		t.Errorf("%d bytes were copied, want %d", c.Bytes(), size)
	}
	c.Close()
	c.Close()
}

func TestNothingWritten(t *testing.T) {
	t.Parallel()
	const size = 1 << 20
	store := newStore(t, false)
	base := zeroBase(t, store, size)
	r := mapPrivate(t, base.File(), size)
	d := capture(t, r.Region)
	if d.Bytes() != 0 || len(d.Extents) != 0 {
		t.Errorf("the delta of a machine that wrote nothing has %d bytes", d.Bytes())
	}
	if err := d.Inject(mapPrivate(t, base.File(), size).Region); err != nil {
		t.Error(err)
	}
	again := rebase(t, store, base, d)
	if n, err := store.AllocatedBytes(again.ID); err != nil || n != 0 {
		t.Errorf("a base of zeros takes %d bytes (%v)", n, err)
	}
}

// TestPageMapFlags is for what a test cannot make happen here: swapped pages.
func TestPageMapFlags(t *testing.T) {
	t.Parallel()
	const (
		softDirty = 1 << 55
		exclusive = 1 << 56
	)
	entries := []struct {
		bits    uint64
		private bool
	}{
		{0, false},                                      // never touched
		{pmPresent | pmFile, false},                     // read from the base
		{pmPresent, true},                               // written
		{pmSwapped, true},                               // written, then swapped out
		{pmSwapped | pmFile, false},                     // a page of the base on its way between places
		{pmPresent | softDirty | exclusive, true},       // other flags mean nothing
		{softDirty | exclusive, false},                  //
		{pmPresent | pmFile | exclusive | 7, false},     //
		{pmSwapped | softDirty | 0xabcdef<<5, true},     // the place in the swap area
		{pmPresent | 1<<54 | 0x1234567, true},           //
		{pmPresent | pmFile | 1<<54 | softDirty, false}, //
		{pmPresent, true},
	}
	var b []byte
	m := newModel(make([]byte, (len(entries)+5)*PageSize))
	for i, e := range entries {
		b = binary.NativeEndian.AppendUint64(b, e.bits)
		m.private[i+5] = e.private
	}
	for cut := 0; cut <= len(b); cut += 8 { // in two pieces, as if they came from two reads
		var got pageList
		got.add(b[:cut], 5, pmFile)
		got.add(b[cut:], 5+int64(cut/8), pmFile)
		if diff := cmp.Diff(m.extents(), []Extent(got)); diff != "" {
			t.Errorf("cut at %d:\n%s", cut, diff)
		}
	}
}

func TestMerge(t *testing.T) {
	t.Parallel()
	rng := newRand(t)
	for range 200 {
		m := newModel(make([]byte, 64*PageSize))
		var list []Extent
		for range rng.IntN(20) {
			at := rng.IntN(64)
			n := 1 + rng.IntN(min(8, 64-at))
			list = append(list, Extent{int64(at) * PageSize, int64(n) * PageSize})
			for p := at; p < at+n; p++ {
				m.private[p] = true
			}
		}
		if diff := cmp.Diff(m.extents(), merge(list)); diff != "" && len(m.extents()) > 0 {
			t.Fatalf("merged:\n%s", diff)
		}
	}
}

// TestTransferBounds keeps the copy inside of RAM and its buffer.
func TestTransferBounds(t *testing.T) {
	t.Parallel()
	const size = 16 * PageSize
	r := mapPrivate(t, zeroBase(t, newStore(t, false), size).File(), size).Region
	for _, c := range []struct {
		name    string
		extents []Extent
		buf     int
	}{
		{"behind the end", []Extent{{15 * PageSize, 2 * PageSize}}, 2 * PageSize},
		{"before the beginning", []Extent{{-PageSize, PageSize}}, PageSize},
		{"overflowing", []Extent{{PageSize, 1<<63 - 1}}, PageSize},
		{"buffer too short", []Extent{{0, 2 * PageSize}}, PageSize},
		{"buffer too long", []Extent{{0, PageSize}}, 2 * PageSize},
	} {
		buf := make([]byte, c.buf)
		if read(r, c.extents, buf) == nil || write(r, c.extents, buf) == nil {
			t.Errorf("%s: it was done", c.name)
		}
	}
	gone := OnePart(1<<22, r.Addr(0), size)
	if err := read(gone, []Extent{{0, PageSize}}, make([]byte, PageSize)); err == nil {
		t.Error("the memory of no process was read")
	}
	// A page that cannot be touched ends the transfer with an error, not with less.
	hole := mapPrivate(t, zeroBase(t, newStore(t, false), size).File(), size)
	if err := unix.Mprotect(hole.bytes[8*PageSize:9*PageSize], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	all := []Extent{{0, size}}
	if read(hole.Region, all, make([]byte, size)) == nil || write(hole.Region, all, make([]byte, size)) == nil {
		t.Error("memory with a hole was copied whole")
	}
}

// TestRegionInParts has RAM that is mapped in two places, the second one below the first, and extents across the seam.
func TestRegionInParts(t *testing.T) {
	t.Parallel()
	const size, seam = 64 * PageSize, 24 * PageSize
	base := zeroBase(t, newStore(t, false), size).File()
	high, err := unix.Mmap(int(base.Fd()), 0, seam, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	low, err := unix.Mmap(int(base.Fd()), seam, size-seam, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = unix.Munmap(high), unix.Munmap(low) })
	address := func(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
	r := Region{PID: os.Getpid(), Size: size, Parts: []Part{{0, address(high), seam}, {seam, address(low), size - seam}}}
	if got := r.Addr(seam - 1); got != address(high)+seam-1 {
		t.Errorf("the last byte of the first part is at %#x", got)
	}
	if got := r.Addr(seam); got != address(low) {
		t.Errorf("the first byte of the second part is at %#x", got)
	}
	if r.Addr(size) != 0 || r.Addr(-1) != 0 {
		t.Error("bytes that are not there have an address")
	}
	bothScans(t, r, nil)
	across := []Extent{{0, PageSize}, {seam - 3*PageSize, 5 * PageSize}, {size - PageSize, PageSize}}
	want := make([]byte, TotalBytes(across))
	for i := range want {
		want[i] = byte(i*7 + i/PageSize + 1)
	}
	if err := write(r, across, want); err != nil {
		t.Fatal(err)
	}
	bothScans(t, r, across)
	if !bytes.Equal(high[seam-3*PageSize:], want[PageSize:4*PageSize]) || !bytes.Equal(low[:2*PageSize], want[4*PageSize:6*PageSize]) {
		t.Error("the bytes are not where they belong")
	}
	c, err := Prepare(r)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Copy(); err != nil {
		t.Fatal(err)
	}
	d := c.Delta()
	if diff := cmp.Diff(across, d.Extents); diff != "" || !bytes.Equal(d.data, want) {
		t.Errorf("the delta is another:\n%s", diff)
	}
	whole := mapPrivate(t, base, size) // one part takes what two have given
	if err := d.Inject(whole.Region); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(whole.bytes[:seam], high) || !bytes.Equal(whole.bytes[seam:], low) {
		t.Error("the machine that it was injected into has another memory")
	}
}
