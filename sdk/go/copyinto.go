package coppice

import (
	"io"
	"os"
)

// openInPlace opens a regular file to be written in place, as cp does: the file keeps its inode, its owner and its
// mode. It returns nil if the name must be replaced instead: if there is no such file, if it is a link, or if it cannot
// be written. It also returns nil if the file has another name (a hard link): an earlier copy from the same guest may
// have planted it, and the file behind the other name must not be overwritten. It also returns nil if the file has the
// set-user-ID or set-group-ID bit, or another owner than the user of this process: bytes from a guest must not run with
// the rights of others.
func openInPlace(root *os.Root, name string) *os.File {
	was, err := root.Lstat(name)
	if err != nil || !was.Mode().IsRegular() || names(was) != 1 || privileged(was) {
		return nil
	}
	f, err := root.OpenFile(name, os.O_WRONLY, 0)
	if err != nil {
		return nil
	}
	if is, err := f.Stat(); err != nil || !os.SameFile(was, is) || privileged(is) || f.Truncate(0) != nil {
		_ = f.Close() // nothing was written
		return nil
	}
	return f
}

// privileged reports whether a file would give its content the rights of others.
func privileged(info os.FileInfo) bool {
	return info.Mode()&(os.ModeSetuid|os.ModeSetgid) != 0 || !owned(info)
}

// moveInto gives a file the content of a temporary file, and removes the temporary file.
func moveInto(root *os.Root, temporary, name string) (err error) {
	from, err := root.Open(temporary)
	if err != nil {
		return err
	}
	defer from.Close()
	to := openInPlace(root, name)
	if to == nil {
		return root.Rename(temporary, name)
	}
	defer func() {
		if closed := to.Close(); err == nil {
			err = closed
		}
	}()
	if _, err := io.Copy(to, from); err != nil {
		return err
	}
	return root.Remove(temporary)
}
