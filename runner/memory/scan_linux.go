package memory

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pagemapScan is _IOWR('f', 16, struct pm_scan_arg) of linux/fs.h; golang.org/x/sys does not have it.
const pagemapScan = 0xc0606610

// Page categories of linux/fs.h.
const (
	pageIsFile    = 1 << 2
	pageIsPresent = 1 << 3
	pageIsSwapped = 1 << 4
)

// scanVector is the number of ranges asked for per call. More than 512 makes Linux 6.18 return duplicates once its
// bounce buffer has overflowed (measured).
const scanVector = 512

type pmScanArg struct {
	size, flags, start, end, walkEnd, vec, vecLen, maxPages       uint64
	categoryInverted, categoryMask, categoryAnyofMask, returnMask uint64
}

type pageRegion struct{ start, end, categories uint64 }

// Method names how private pages are found.
type Method string

// The methods.
const (
	MethodPagemapScan Method = "PAGEMAP_SCAN"
	MethodPagemap     Method = "pagemap"
)

// ScanMethod reports which method this kernel offers, by trying it on this process.
var ScanMethod = sync.OnceValue(func() Method {
	page, err := unix.Mmap(-1, 0, PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return MethodPagemap
	}
	defer func() { _ = unix.Munmap(page) }()
	page[0] = 1
	r := OnePart(os.Getpid(), uint64(uintptr(unsafe.Pointer(&page[0]))), PageSize)
	if found, err := scan(r, scanIoctl); err != nil || TotalBytes(found) != PageSize {
		return MethodPagemap
	}
	return MethodPagemapScan
})

// Scan returns the private pages of r, present or swapped, sorted and merged. It is exact only while the machine is
// paused; on a running one it is a good estimate.
func Scan(r Region) ([]Extent, error) {
	if ScanMethod() == MethodPagemapScan {
		return scan(r, scanIoctl)
	}
	return scan(r, scanPagemap)
}

// Touched returns all pages of r that the machine has in use, private or shared, sorted and merged. Where it has read a page of its base the
// kernel gives it those beside it too, if they are in memory: up to 15 more.
func Touched(r Region) ([]Extent, error) {
	if ScanMethod() == MethodPagemapScan {
		return scan(r, func(f *os.File, p Part) ([]Extent, error) { return scanCategories(f, p, 0) })
	}
	return scan(r, func(f *os.File, p Part) ([]Extent, error) { return scanEntries(f, p, 0) })
}

// scan puts together what a method finds in the parts of r.
func scan(r Region, method func(pagemap *os.File, p Part) ([]Extent, error)) ([]Extent, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", r.PID))
	if err != nil {
		return nil, fmt.Errorf("open the page map of process %d: %w", r.PID, err)
	}
	defer f.Close()
	var out []Extent
	for _, p := range r.Parts {
		found, err := method(f, p)
		if err != nil {
			return nil, fmt.Errorf("process %d: %w", r.PID, err)
		}
		out = append(out, found...)
	}
	return merge(out), nil
}

func scanIoctl(f *os.File, p Part) ([]Extent, error) { return scanCategories(f, p, pageIsFile) }

// scanCategories finds pages that are in memory or swapped, and are of none of the categories of without.
func scanCategories(f *os.File, p Part, without uint64) ([]Extent, error) {
	var (
		out  []Extent
		vec  = new([scanVector]pageRegion)
		from = p.Addr
		end  = p.Addr + uint64(p.Size)
		pin  runtime.Pinner
	)
	pin.Pin(vec) // the kernel gets its address as a number, which Go does not follow when it moves a stack
	defer pin.Unpin()
	for from < end {
		arg := pmScanArg{
			start: from, end: end, vec: uint64(uintptr(unsafe.Pointer(&vec[0]))), vecLen: scanVector,
			categoryInverted: without, categoryMask: without,
			categoryAnyofMask: pageIsPresent | pageIsSwapped, returnMask: pageIsPresent | pageIsSwapped,
		}
		arg.size = uint64(unsafe.Sizeof(arg))
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), pagemapScan, uintptr(unsafe.Pointer(&arg)))
		if errno != 0 {
			return nil, fmt.Errorf("ioctl PAGEMAP_SCAN: %w", errno)
		}
		for _, v := range vec[:n] {
			out = append(out, Extent{Offset: p.Offset + int64(v.start-p.Addr), Length: int64(v.end - v.start)})
		}
		if arg.walkEnd <= from {
			return nil, fmt.Errorf("ioctl PAGEMAP_SCAN made no progress at %#x", from)
		}
		from = arg.walkEnd
	}
	return out, nil
}

// Bits of an entry of /proc/PID/pagemap.
const (
	pmPresent = 1 << 63
	pmSwapped = 1 << 62
	pmFile    = 1 << 61 // file page or shared anonymous memory
)

// scanPagemap is Scan for kernels before 6.7: eight bytes are read per page.
func scanPagemap(f *os.File, p Part) ([]Extent, error) { return scanEntries(f, p, pmFile) }

// scanEntries finds pages that are in memory or swapped, and have none of the bits of without.
func scanEntries(f *os.File, p Part, without uint64) ([]Extent, error) {
	const entry, batch = 8, 128 << 10
	var (
		out pageList
		buf = make([]byte, batch)
	)
	pages, first := p.Size/PageSize, p.Offset/PageSize
	for at := int64(0); at < pages; {
		want := min(int64(batch/entry), pages-at)
		n, err := f.ReadAt(buf[:want*entry], (int64(p.Addr/PageSize)+at)*entry)
		if int64(n) != want*entry {
			return nil, fmt.Errorf("read the page map: %w", errors.Join(err, io.ErrUnexpectedEOF))
		}
		out.add(buf[:want*entry], first+at, without)
		at += want
	}
	return out, nil
}

// pageList is a list of extents that grows by pages, in order.
type pageList []Extent

// add adds the pages that are there by their entries in the page map, and have none of the bits of without. The first entry is that of page
// number first.
func (l *pageList) add(entries []byte, first int64, without uint64) {
	for i := int64(0); len(entries) >= 8; i, entries = i+1, entries[8:] {
		if e := binary.NativeEndian.Uint64(entries); e&(pmPresent|pmSwapped) == 0 || e&without != 0 {
			continue
		}
		off := (first + i) * PageSize
		if k := len(*l); k > 0 && (*l)[k-1].End() == off {
			(*l)[k-1].Length += PageSize
		} else {
			*l = append(*l, Extent{off, PageSize})
		}
	}
}
