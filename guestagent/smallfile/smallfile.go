//go:build linux

package smallfile

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// limit bounds what Read reads.
const limit = 64 << 10

// PathError names the operation and the path of an error.
func PathError(op, path string, err error) error { return &fs.PathError{Op: op, Path: path, Err: err} }

// Open opens a file and returns its descriptor.
func Open(path string, flags int, mode uint32) (int, error) {
	for {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, mode)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

// Read reads a file of at most limit bytes.
func Read(path string) ([]byte, error) {
	fd, err := Open(path, unix.O_RDONLY, 0)
	if err != nil {
		return nil, PathError("open", path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	b, err := ReadToEnd(fd, limit)
	if err != nil {
		return nil, PathError("read", path, err)
	}
	return b, nil
}

// ReadToEnd reads at most the given number of bytes.
func ReadToEnd(fd, most int) ([]byte, error) {
	b := make([]byte, 0, 512)
	for len(b) < most {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := unix.Read(fd, b[len(b):cap(b)])
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return nil, err
		case n == 0:
			return b, nil
		default:
			b = b[:len(b)+n]
		}
	}
	return b, nil
}

// Write writes a file in place: programs that have it open or mounted see the new content.
func Write(path string, b []byte, mode uint32) error {
	fd, err := Open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC, mode)
	if err != nil {
		return PathError("open", path, err)
	}
	for len(b) > 0 {
		n, err := unix.Write(fd, b)
		if err != nil && !errors.Is(err, unix.EINTR) {
			_ = unix.Close(fd)
			return PathError("write", path, err)
		}
		b = b[max(n, 0):]
	}
	return os.NewSyscallError("close", unix.Close(fd))
}

// Replace replaces a file atomically: a program that opens the path finds the old content or the new. It is not made
// durable, because memory and disk of a guest are only kept together. Only one writer at a time.
func Replace(path string, b []byte, mode uint32) error {
	temp := path + ".coppice-new"
	err := Write(temp, b, mode)
	if err == nil {
		err = unix.Chmod(temp, mode)
	}
	if err == nil {
		if err = unix.Rename(temp, path); err == nil {
			return nil
		}
	}
	_ = unix.Unlink(temp)
	return err
}

// Exists reports whether a path exists.
func Exists(path string) bool { return unix.Access(path, unix.F_OK) == nil }

// IsRegular reports whether a path is a regular file, and not a link to one.
func IsRegular(path string) bool {
	var st unix.Stat_t
	return unix.Lstat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG
}

// List lists a directory; a missing one counts as empty.
func List(dir string) ([]string, error) {
	fd, err := Open(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, PathError("open", dir, err)
	}
	defer func() { _ = unix.Close(fd) }()
	var out []string
	buf := make([]byte, 8<<10)
	for {
		n, err := unix.ReadDirent(fd, buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, PathError("list", dir, err)
		}
		if n == 0 {
			return out, nil
		}
		_, _, out = unix.ParseDirent(buf[:n], -1, out)
	}
}
