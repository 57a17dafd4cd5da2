package pager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// mount is the file system: a directory with one readable file for each image.
type mount struct {
	dir    string
	fd     *os.File // descriptor of dir, through which clients open files
	server *fuse.Server
	root   *rootNode
}

// newMount mounts the file system at a directory, which it creates. readAhead is the kernel's read-ahead for its files.
func newMount(dir string, s *Server, memory bool, readAhead int) (*mount, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	root := &rootNode{server: s, memory: memory}
	forever := time.Hour
	var none time.Duration
	server, err := fs.Mount(dir, root, &fs.Options{
		AttrTimeout: &forever, EntryTimeout: &none,
		MountOptions: fuse.MountOptions{
			// A VMM is another user, and opens only what it was given.
			AllowOther: true, DirectMountStrict: true, FsName: "coppice-pager", Name: "coppice", MaxReadAhead: readAhead, MaxBackground: 64,
			DisableXAttrs: true, IgnoreSecurityLabels: true,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("mount the pager's file system: %w", err)
	}
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the pager's file system: %w", err), unmount(dir, syscall.MNT_FORCE))
	}
	return &mount{dir: dir, fd: os.NewFile(uintptr(fd), dir), server: server, root: root}, nil
}

// The amount that the kernel reads at once. For a disk it is a few pages: the rest of a frame is on this host
// afterwards, but is copied into the page cache only when it is touched. For memory it is only the touched page,
// because the pages beside it are seldom used next (docs/adr/0039-a-rehearsal.md). The library takes 0 for the default,
// and the kernel counts whole pages.
const (
	diskReadAhead   = 16 << 10
	memoryReadAhead = 1
)

// close unmounts. Open files work until they are closed or the process ends. If there are none, the connection to the
// kernel is ended. Otherwise a mount namespace that was made meanwhile, for a build or another service, could keep it
// alive with its copy of the mount.
func (m *mount) close(open bool) error {
	err := m.fd.Close()
	if open {
		return errors.Join(err, unmount(m.dir, 0))
	}
	if err := errors.Join(err, unmount(m.dir, syscall.MNT_FORCE)); err != nil {
		return err
	}
	m.server.Wait()
	return nil
}

func unmount(dir string, how int) error {
	if err := syscall.Unmount(dir, syscall.MNT_DETACH|how); err != nil {
		return fmt.Errorf("unmount the pager's file system: %w", err)
	}
	return nil
}

// rootNode is the root directory.
type rootNode struct {
	fs.Inode
	server *Server
	memory bool // it has only the images that are mapped as memory
}

var _ fs.NodeLookuper = (*rootNode)(nil)

// Lookup finds an image.
func (n *rootNode) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	im := n.server.image(name)
	if im == nil || im.memory != n.memory {
		return nil, syscall.ENOENT
	}
	im.attributes(&out.Attr)
	return n.NewInode(ctx, &fileNode{image: im, server: n.server}, fs.StableAttr{Mode: syscall.S_IFREG, Ino: im.ino}), 0
}

// fileNode is the file of an image.
type fileNode struct {
	fs.Inode
	image  *image
	server *Server
}

var (
	_ fs.NodeOpener    = (*fileNode)(nil)
	_ fs.NodeGetattrer = (*fileNode)(nil)
	_ fs.NodeSetattrer = (*fileNode)(nil)
	_ fs.NodeReader    = (*fileNode)(nil)
	_ fs.NodeWriter    = (*fileNode)(nil)
)

func (im *image) attributes(a *fuse.Attr) {
	a.Mode, a.Size, a.Ino, a.Nlink, a.Blksize = syscall.S_IFREG|0o444, uint64(im.tree.Size()), im.ino, 1, pageSize
	a.Blocks = a.Size / 512
}

// Open also succeeds for writing, because a QEMU before 8.2 opens files for writing that it maps privately. Writing
// fails. So does a shared mapping, through which one VMM could write what all others see: the kernel makes no shared
// mapping of a file that is opened for direct I/O. The page cache of readers stays valid.
func (n *fileNode) Open(_ context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	n.image.opened.Add(1)
	n.image.pushed.Store(false) // a mapping of a file that is open for direct I/O empties the cache
	if flags&syscall.O_ACCMODE != syscall.O_RDONLY {
		return &handle{n}, fuse.FOPEN_DIRECT_IO, 0
	}
	return &handle{n}, fuse.FOPEN_KEEP_CACHE, 0
}

// handle is one opening of a file.
type handle struct{ of *fileNode }

var _ fs.FileReleaser = (*handle)(nil)

// Release is called when an opened file is neither open nor mapped any more.
func (h *handle) Release(context.Context) syscall.Errno {
	if h.of.image.opened.Add(-1) == 0 {
		h.of.server.retire(h.of.image)
	}
	return 0
}

// Getattr returns the file's size.
func (n *fileNode) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	n.image.attributes(&out.Attr)
	return 0
}

// Setattr is refused.
func (n *fileNode) Setattr(context.Context, fs.FileHandle, *fuse.SetAttrIn, *fuse.AttrOut) syscall.Errno {
	return syscall.EROFS
}

// Write is refused.
func (n *fileNode) Write(context.Context, fs.FileHandle, []byte, int64) (uint32, syscall.Errno) {
	return 0, syscall.EROFS
}

// Read waits until the bytes are present. Signals to the reader do not end the wait, because a page fault that ends with
// an error ends the machine. Only SIGKILL ends the wait: then the machine ends anyway, and a process cannot end while one
// of its threads waits here.
func (n *fileNode) Read(ctx context.Context, _ fs.FileHandle, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	size := n.image.tree.Size()
	if off >= size {
		return fuse.ReadResultData(nil), 0
	}
	dest = dest[:min(int64(len(dest)), size-off)]
	if n.image.wanted.Load() && n.image.pushed.CompareAndSwap(false, true) {
		n.server.push(n)
	}
	var thread int // the kernel's number of the reading thread, not of its process
	if caller, ok := fuse.FromContext(ctx); ok {
		thread = int(caller.Pid)
	}
	if err := n.image.read(ctx.Done(), dest, off, thread); errors.Is(err, errReaderKilled) {
		return nil, syscall.EINTR
	} else if err != nil {
		return nil, syscall.EIO
	}
	return fuse.ReadResultData(dest), 0
}
