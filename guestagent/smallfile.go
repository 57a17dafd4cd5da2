//go:build linux

package guestagent

import (
	"errors"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// Small files are read and written by plain system calls. Package os would execute more code around them, and code that
// runs for the first time in a clone is what makes a reseal slow without hardware virtualization.

const smallFile = 64 << 10

func pathError(op, path string, err error) error { return &fs.PathError{Op: op, Path: path, Err: err} }

func openRaw(path string, flags int, mode uint32) (int, error) {
	for {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, mode)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

// readSmall reads a file of at most smallFile bytes.
func readSmall(path string) ([]byte, error) {
	fd, err := openRaw(path, unix.O_RDONLY, 0)
	if err != nil {
		return nil, pathError("open", path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	b, err := readToEnd(fd, smallFile)
	if err != nil {
		return nil, pathError("read", path, err)
	}
	return b, nil
}

// readToEnd reads at most limit bytes.
func readToEnd(fd, limit int) ([]byte, error) {
	b := make([]byte, 0, 512)
	for len(b) < limit {
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

// writeSmall writes a file in place: whoever has it open or mounted sees the new content.
func writeSmall(path string, b []byte, mode uint32) error {
	fd, err := openRaw(path, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC, mode)
	if err != nil {
		return pathError("open", path, err)
	}
	for len(b) > 0 {
		n, err := unix.Write(fd, b)
		if err != nil && !errors.Is(err, unix.EINTR) {
			_ = unix.Close(fd)
			return pathError("write", path, err)
		}
		b = b[max(n, 0):]
	}
	return os.NewSyscallError("close", unix.Close(fd))
}

// replaceFile replaces a file atomically: whoever opens the path finds the old content or the new. It is not made
// durable, because memory and disk of a guest are only kept together. Only one writer at a time.
func replaceFile(path string, b []byte, mode uint32) error {
	temp := path + ".coppice-new"
	err := writeSmall(temp, b, mode)
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

// exists reports whether a path exists.
func exists(path string) bool { return unix.Access(path, unix.F_OK) == nil }

// isRegular reports whether a path is a regular file, and not a link to one.
func isRegular(path string) bool {
	var st unix.Stat_t
	return unix.Lstat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG
}

// readBack returns the evidence of a file: what the workload reads there now.
func readBack(path string) (string, error) {
	b, err := readSmall(path)
	if err != nil {
		return "", err
	}
	return core.Clip(strings.TrimSpace(string(b))), nil
}

// names lists a directory; a missing one counts as empty.
func names(dir string) ([]string, error) {
	fd, err := openRaw(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, pathError("open", dir, err)
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
			return nil, pathError("list", dir, err)
		}
		if n == 0 {
			return out, nil
		}
		_, _, out = unix.ParseDirent(buf[:n], -1, out)
	}
}
