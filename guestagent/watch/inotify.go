//go:build linux

package watch

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

const (
	mask = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MODIFY | unix.IN_ATTRIB | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
		unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK
	maxEntries  = 10_000 // of a directory that is searched for subdirectories
	eventBuffer = 64 << 10
)

// add watches a directory, and those below it if the watch is recursive. found is called for the
// entries of new directories: they may have been made before the directories were watched. It is
// called with the user's rights, and on the goroutine of run or before that.
func (w *Watch) add(path string, flags uint32, found func(path string, dir bool)) error {
	if len(w.dirs) >= maxDirs || w.text.Load()+int64(len(path)) > maxText {
		w.incomplete()
		if path == w.root {
			return core.Errorf(core.Exhausted, guestapi.CodeWatchLimit, "watch %s: too many directories", core.Clip(path))
		}
		return nil
	}
	rc, err := w.file.SyscallConn()
	if err != nil {
		return err
	}
	wd := 0
	var added error
	if err := rc.Control(func(fd uintptr) { wd, added = unix.InotifyAddWatch(int(fd), path, mask|flags) }); err != nil {
		return err
	}
	if added != nil {
		if path != w.root {
			if !errors.Is(added, unix.ENOENT) && !errors.Is(added, unix.ENOTDIR) {
				w.incomplete() // the user may not read it, or the kernel has no room
			}
			return nil
		}
		if errors.Is(added, unix.ENOSPC) {
			return core.Errorf(core.Exhausted, guestapi.CodeWatchLimit, "watch %s: the kernel of the sandbox watches as many directories as it may", core.Clip(path))
		}
		return &fs.PathError{Op: "watch", Path: path, Err: added}
	}
	w.drop(wd) // the kernel has one watch of a directory, under whatever name
	w.dirs[wd] = path
	w.text.Add(int64(len(path)))
	if !w.info.Recursive && found == nil {
		return nil
	}
	return w.addBelow(path, found)
}

// addBelow watches the subdirectories of a directory. It follows no links and stays on the file system.
func (w *Watch) addBelow(path string, found func(path string, dir bool)) error {
	d, err := os.OpenFile(path, unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		if path == w.root {
			d, err = os.OpenFile(path, unix.O_DIRECTORY|unix.O_NONBLOCK, 0) // the requested path may be a link to a directory
		}
		if err != nil {
			return nil //nolint:nilerr // it was removed meanwhile, or the user may watch it but not list it
		}
	}
	list, err := d.ReadDir(maxEntries)
	_ = d.Close() // a deep tree must not keep a descriptor for each level
	if err != nil && !errors.Is(err, io.EOF) {
		w.incomplete()
		return nil
	}
	if len(list) == maxEntries {
		w.incomplete()
	}
	var dirs []string // the other entries are not kept while what is below is read
	for _, e := range list {
		if found != nil {
			found(join(path, e.Name()), e.IsDir())
		}
		if e.IsDir() && w.info.Recursive {
			dirs = append(dirs, e.Name())
		}
	}
	for _, name := range dirs {
		p := join(path, name)
		var st unix.Stat_t
		if unix.Lstat(p, &st) != nil || st.Dev != w.dev {
			continue
		}
		if err := w.add(p, unix.IN_DONT_FOLLOW, found); err != nil {
			return err
		}
	}
	return nil
}

// run reads the kernel's events until the watch is closed or its directory is gone.
func (w *Watch) run() {
	defer close(w.done)
	defer w.end()
	buf := make([]byte, eventBuffer)
	for {
		n, err := w.file.Read(buf)
		if err != nil {
			return // closed
		}
		for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
			wd, bits, length := int(int32(binary.NativeEndian.Uint32(b))), binary.NativeEndian.Uint32(b[4:]), int(binary.NativeEndian.Uint32(b[12:]))
			name, _, _ := bytes.Cut(b[unix.SizeofInotifyEvent:unix.SizeofInotifyEvent+length], []byte{0})
			b = b[unix.SizeofInotifyEvent+length:]
			if !w.handle(wd, bits, string(name)) {
				return
			}
		}
	}
}

// handle handles one event of the kernel. It returns false when the watched directory itself is gone.
func (w *Watch) handle(wd int, bits uint32, name string) bool {
	if bits&unix.IN_Q_OVERFLOW != 0 {
		w.notify(guestapi.WatchOverflow, w.root, true)
		w.incomplete() // events of new directories may be lost
		return true
	}
	dir, ok := w.dirs[wd]
	if !ok {
		return true // of a directory that was moved elsewhere
	}
	if bits&unix.IN_IGNORED != 0 {
		w.drop(wd)
		return dir != w.root
	}
	if name == "" {
		return w.ofItself(dir, bits)
	}
	path, isDir := join(dir, name), bits&unix.IN_ISDIR != 0
	switch {
	case bits&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		moved, grows := bits&unix.IN_MOVED_TO != 0, isDir && w.info.Recursive
		if moved && grows {
			w.grow(path, false) // whoever sees the event may change what is below at once, and that must be seen too
		}
		w.notify(guestapi.WatchCreate, path, isDir)
		if !moved && grows {
			w.grow(path, true)
		}
	case bits&unix.IN_MOVED_FROM != 0:
		if isDir {
			w.forget(path)
		}
		w.notify(guestapi.WatchRename, path, isDir)
	case bits&unix.IN_DELETE != 0:
		w.notify(guestapi.WatchRemove, path, isDir)
	case bits&unix.IN_MODIFY != 0:
		w.notify(guestapi.WatchWrite, path, isDir)
	case bits&unix.IN_ATTRIB != 0:
		w.notify(guestapi.WatchChmod, path, isDir)
	}
	return true
}

// ofItself handles an event of a watched directory itself. If its parent is watched, the parent reports it too.
func (w *Watch) ofItself(dir string, bits uint32) bool {
	if dir != w.root {
		return true
	}
	switch {
	case bits&unix.IN_DELETE_SELF != 0:
		w.notify(guestapi.WatchRemove, dir, true)
		return false
	case bits&unix.IN_MOVE_SELF != 0:
		w.notify(guestapi.WatchRename, dir, true)
		return false
	case bits&unix.IN_ATTRIB != 0:
		w.notify(guestapi.WatchChmod, dir, true)
	}
	return bits&unix.IN_UNMOUNT == 0
}

// grow watches a directory that was made or moved here. It reports the entries of a new directory,
// because they may have been made before the directory was watched. (The kernel reports those that
// were made afterwards, so an entry may be reported twice.)
func (w *Watch) grow(path string, fresh bool) {
	var found func(path string, dir bool)
	if fresh {
		found = func(p string, dir bool) { w.notify(guestapi.WatchCreate, p, dir) }
	}
	err := w.do(context.Background(), func() error {
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil || st.Dev != w.dev || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return nil //nolint:nilerr // it has gone again
		}
		return w.add(path, unix.IN_DONT_FOLLOW, found)
	})
	if err != nil {
		w.incomplete()
	}
}

// forget stops watching a directory that was moved elsewhere, and those below it.
func (w *Watch) forget(path string) {
	rc, err := w.file.SyscallConn()
	if err != nil {
		return
	}
	for wd, dir := range w.dirs {
		if below(dir, path) {
			_ = rc.Control(func(fd uintptr) { _, _ = unix.InotifyRmWatch(int(fd), uint32(wd)) })
			w.drop(wd)
		}
	}
}

// drop forgets a directory that is not watched any more.
func (w *Watch) drop(wd int) {
	w.text.Add(-int64(len(w.dirs[wd])))
	delete(w.dirs, wd)
}
