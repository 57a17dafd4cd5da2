// Package sparse copies files that are mostly holes. It shares their extents if the file system
// can. Otherwise it copies their data and keeps their holes.
package sparse

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Method says how a file was cloned.
type Method string

// The methods.
const (
	Reflink Method = "reflink"
	Copied  Method = "copy"
)

// Clone makes dst, a file that is open for writing, hold the bytes of src. What dst held is lost. Where the file system can
// share extents (XFS, btrfs), the cost follows the number of src's extents and not its size; dirty page cache of src is
// written out first by the kernel, so a caller in a hurry has flushed src before.
func Clone(dst, src *os.File) (Method, error) {
	info, err := src.Stat()
	if err != nil {
		return "", err
	}
	own, err := dst.Stat()
	if err != nil {
		return "", err
	}
	if os.SameFile(info, own) { // it would be emptied before it is read
		return "", fmt.Errorf("clone %s onto itself", src.Name())
	}
	if own.Size() > info.Size() { // sharing extents leaves in place what dst has more
		if err := dst.Truncate(info.Size()); err != nil {
			return "", err
		}
	}
	err = unix.IoctlFileClone(int(dst.Fd()), int(src.Fd()))
	if err == nil {
		return Reflink, nil
	}
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EXDEV) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOTTY) {
		return "", fmt.Errorf("clone %s: %w", src.Name(), err)
	}
	if err := errors.Join(dst.Truncate(0), dst.Truncate(info.Size())); err != nil {
		return "", err
	}
	return Copied, Copy(dst, src, info.Size())
}

// Copy writes the data of the first size bytes of src to the same places of dst. Holes of src are not written.
func Copy(dst, src *os.File, size int64) error {
	const chunk = 1 << 20
	var buf []byte
	for at := int64(0); at < size; {
		start, err := unix.Seek(int(src.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // only a hole is left
		}
		if err != nil {
			return fmt.Errorf("find data in %s: %w", src.Name(), err)
		}
		if start >= size {
			return nil
		}
		end, err := unix.Seek(int(src.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return fmt.Errorf("find a hole in %s: %w", src.Name(), err)
		}
		end = min(end, size)
		if buf == nil {
			buf = make([]byte, chunk)
		}
		for at = start; at < end; {
			n, err := src.ReadAt(buf[:min(chunk, end-at)], at)
			if n == 0 {
				return fmt.Errorf("read %s: %w", src.Name(), errors.Join(err, io.ErrUnexpectedEOF))
			}
			if _, err := dst.WriteAt(buf[:n], at); err != nil {
				return fmt.Errorf("write %s: %w", dst.Name(), err)
			}
			at += int64(n)
		}
	}
	return nil
}

// Zero makes n bytes of f from off on zeros, and a hole where the file system can: a range that is a hole stays one, and
// data is freed.
func Zero(f *os.File, off, n int64) error {
	err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	if err == nil {
		return nil
	}
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("make a hole in %s: %w", f.Name(), err)
	}
	zeros := make([]byte, min(n, 1<<20))
	for end := off + n; off < end; {
		m, err := f.WriteAt(zeros[:min(int64(len(zeros)), end-off)], off)
		if err != nil {
			return fmt.Errorf("write %s: %w", f.Name(), err)
		}
		off += int64(m)
	}
	return nil
}

// Allocated returns the bytes that a file takes on disk; shared extents count in full.
func Allocated(f *os.File) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("examine %s: %w", f.Name(), err)
	}
	return st.Blocks * 512, nil
}

// CanReflink reports whether files in dir can share extents, by trying it.
func CanReflink(dir string) (bool, error) {
	src, err := os.CreateTemp(dir, ".reflink-*")
	if err != nil {
		return false, err
	}
	defer func() { _ = errors.Join(src.Close(), os.Remove(src.Name())) }()
	dst, err := os.CreateTemp(dir, ".reflink-*")
	if err != nil {
		return false, err
	}
	defer func() { _ = errors.Join(dst.Close(), os.Remove(dst.Name())) }()
	if _, err := src.Write(make([]byte, 4096)); err != nil {
		return false, err
	}
	return unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) == nil, nil
}
