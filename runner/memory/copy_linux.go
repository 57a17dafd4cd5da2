package memory

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxIOV is the kernel's bound on the vectors of one process_vm_readv or _writev.
const maxIOV = 1024

// read copies the extents of r, one behind the other, into buf, which has their total length.
func read(r Region, extents []Extent, buf []byte) error {
	return transfer(r, extents, buf, unix.ProcessVMReadv, "read")
}

// write copies buf, which holds the extents one behind the other, into r. The pages become private to the VMM.
func write(r Region, extents []Extent, buf []byte) error {
	return transfer(r, extents, buf, unix.ProcessVMWritev, "write")
}

type vmTransfer func(pid int, local []unix.Iovec, remote []unix.RemoteIovec, flags uint) (int, error)

func transfer(r Region, extents []Extent, buf []byte, move vmTransfer, verb string) error {
	if total := TotalBytes(extents); total != int64(len(buf)) {
		return fmt.Errorf("%s memory of process %d: %d bytes do not fill extents of %d", verb, r.PID, len(buf), total)
	}
	all, err := r.vectors(extents)
	if err != nil {
		return fmt.Errorf("%s memory of process %d: %w", verb, r.PID, err)
	}
	var done int64 // bytes of buf already moved
	for len(all) > 0 {
		remote := all[:min(len(all), maxIOV)]
		all = all[len(remote):]
		var want int64
		for _, v := range remote {
			want += int64(v.Len)
		}
		moved, err := transferAll(r.PID, buf[done:done+want], remote, move)
		if err != nil {
			return fmt.Errorf("%s memory of process %d: %d of %d bytes: %w", verb, r.PID, moved, want, err)
		}
		done += want
	}
	return nil
}

// vectors are where the extents are in the address space of the process, in order. An extent that lies in two parts is two.
func (r Region) vectors(extents []Extent) ([]unix.RemoteIovec, error) {
	out := make([]unix.RemoteIovec, 0, len(extents)+1)
	for _, e := range extents {
		if e.Offset < 0 || e.Length < 0 || e.Length > r.Size-e.Offset {
			return nil, fmt.Errorf("extent %d+%d lies outside of %d bytes of RAM", e.Offset, e.Length, r.Size)
		}
		for _, p := range r.Parts {
			from, to := max(e.Offset, p.Offset), min(e.End(), p.Offset+p.Size)
			if from < to {
				out = append(out, unix.RemoteIovec{Base: uintptr(p.Addr + uint64(from-p.Offset)), Len: int(to - from)})
			}
		}
	}
	return out, nil
}

// transferAll repeats partial transfers: the kernel moves at most 2 GiB at once and may stop between vectors.
func transferAll(pid int, buf []byte, remote []unix.RemoteIovec, move vmTransfer) (int64, error) {
	var total int64
	for len(buf) > 0 {
		local := []unix.Iovec{{Base: unsafe.SliceData(buf)}}
		local[0].SetLen(len(buf))
		n, err := move(pid, local, remote, 0)
		if err != nil {
			return total, err
		}
		if n == 0 {
			return total, unix.EFAULT
		}
		total += int64(n)
		buf = buf[n:]
		for n > 0 {
			if n < remote[0].Len {
				remote[0].Base += uintptr(n)
				remote[0].Len -= n
				break
			}
			n -= remote[0].Len
			remote = remote[1:]
		}
	}
	return total, nil
}
