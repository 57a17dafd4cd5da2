package build

import (
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
)

// cpioWriter writes an archive in the "newc" format, which the kernel unpacks as its initial root
// (Documentation/driver-api/early-userspace/buffer-format.rst). Every entry is owned by root and has the time 0.
type cpioWriter struct {
	w     io.Writer
	off   int64
	inode uint32
	dirs  map[string]bool
}

// The file type bits of a mode in the archive.
const (
	cpioDir  = 0o040000
	cpioChar = 0o020000
	cpioReg  = 0o100000
	cpioEnd  = "TRAILER!!!"
)

func newCPIOWriter(w io.Writer) *cpioWriter { return &cpioWriter{w: w, dirs: map[string]bool{}} }

// Dir adds a directory and the directories above it. Adding one again has no effect.
func (c *cpioWriter) Dir(name string, perm fs.FileMode) error {
	name, err := cpioName(name)
	if err != nil || c.dirs[name] {
		return err
	}
	if err := c.parent(name); err != nil {
		return err
	}
	c.dirs[name] = true
	return c.entry(name, cpioDir|uint32(perm.Perm()), 2, 0, 0, nil)
}

// File adds a regular file.
func (c *cpioWriter) File(name string, perm fs.FileMode, data []byte) error {
	name, err := cpioName(name)
	if err != nil {
		return err
	}
	if err := c.parent(name); err != nil {
		return err
	}
	return c.entry(name, cpioReg|uint32(perm.Perm()), 1, 0, 0, data)
}

// Char adds a character device.
func (c *cpioWriter) Char(name string, perm fs.FileMode, major, minor uint32) error {
	name, err := cpioName(name)
	if err != nil {
		return err
	}
	if err := c.parent(name); err != nil {
		return err
	}
	return c.entry(name, cpioChar|uint32(perm.Perm()), 1, major, minor, nil)
}

// Close writes the trailer; it does not close the underlying writer. The archive ends on a 512-byte boundary.
func (c *cpioWriter) Close() error {
	c.inode = 0
	if err := c.entry(cpioEnd, 0, 1, 0, 0, nil); err != nil {
		return err
	}
	return c.pad(512)
}

func (c *cpioWriter) parent(name string) error {
	if dir := path.Dir(name); dir != "." {
		return c.Dir(dir, 0o755)
	}
	return nil
}

func (c *cpioWriter) entry(name string, mode, nlink, major, minor uint32, data []byte) error {
	if int64(len(data)) > 0xffffffff {
		return fmt.Errorf("cpio: %s is larger than the format's 4 GiB", name)
	}
	ino := c.inode
	if name != cpioEnd {
		c.inode++
		ino = c.inode
	}
	header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		ino, mode, 0, 0, nlink, 0, len(data), 0, 0, major, minor, len(name)+1, 0)
	if err := c.write([]byte(header + name + "\x00")); err != nil {
		return err
	}
	if err := c.pad(4); err != nil {
		return err
	}
	if err := c.write(data); err != nil {
		return err
	}
	return c.pad(4)
}

func (c *cpioWriter) pad(to int64) error {
	if rest := c.off % to; rest != 0 {
		return c.write(make([]byte, to-rest))
	}
	return nil
}

func (c *cpioWriter) write(b []byte) error {
	n, err := c.w.Write(b)
	c.off += int64(n)
	if err != nil {
		return fmt.Errorf("write cpio: %w", err)
	}
	return nil
}

// cpioName makes an absolute or relative path relative to the archive's root.
func cpioName(name string) (string, error) {
	clean := strings.TrimPrefix(path.Clean("/"+name), "/")
	if clean == "" || clean == cpioEnd || strings.ContainsRune(clean, 0) {
		return "", fmt.Errorf("cpio: %q cannot be the name of an entry", name)
	}
	return clean, nil
}
