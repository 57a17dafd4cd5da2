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

// mount is the file system: a directory with a file for each image, that can be read.
type mount struct {
	dir    string
	fd     *os.File // of dir, by which clients open its files
	server *fuse.Server
	root   *rootNode
}

// newMount mounts it at a directory, which is made, for files of which the kernel reads so much ahead.
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
			// A VMM is another user, and only opens what it was given.
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

// How much the kernel asks for at once. Of a disk it is some pages: the rest of a frame is here afterwards, but is not copied into the page cache
// unless it is touched. Of memory it is the page that is touched: those beside it are seldom used next (docs/adr/0039-a-rehearsal.md). The library takes 0 for
// the default, and the kernel counts whole pages.
const (
	diskReadAhead   = 16 << 10
	memoryReadAhead = 1
)

// close unmounts. Files that are open go on until they are closed, or the process ends. When there are none the connection to the kernel is
// ended: a mount namespace that was made meanwhile, of a build or of another service, has a copy of the mount, which would keep it.
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

// rootNode is the directory.
type rootNode struct {
	fs.Inode
	server *Server
	memory bool // it has the images that are mapped as memory, and no others
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

// Open succeeds for writing too: a QEMU before 8.2 opens what it maps privately so. Writing fails, and so does a shared mapping, through which a
// VMM could write what all of them see: the kernel gives none of a file that is opened for direct I/O. What it has read for readers stays
// good.
func (n *fileNode) Open(_ context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	n.image.opened.Add(1)
	n.image.pushed.Store(false) // who opens it for direct I/O and maps it empties the cache
	if flags&syscall.O_ACCMODE != syscall.O_RDONLY {
		return &handle{n}, fuse.FOPEN_DIRECT_IO, 0
	}
	return &handle{n}, fuse.FOPEN_KEEP_CACHE, 0
}

// handle is one opening of a file.
type handle struct{ of *fileNode }

var _ fs.FileReleaser = (*handle)(nil)

// Release is called once nobody has what was opened open or mapped any more.
func (h *handle) Release(context.Context) syscall.Errno {
	if h.of.image.opened.Add(-1) == 0 {
		h.of.server.retire(h.of.image)
	}
	return 0
}

// Getattr says how large it is.
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

// Read waits until the bytes are here, whatever signals the reader gets meanwhile: a page fault that ends with an error ends the machine.
// Only SIGKILL ends the wait: the machine is ended anyway, and a process cannot end while a thread of it waits here.
func (n *fileNode) Read(ctx context.Context, _ fs.FileHandle, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	size := n.image.tree.Size()
	if off >= size {
		return fuse.ReadResultData(nil), 0
	}
	dest = dest[:min(int64(len(dest)), size-off)]
	if n.image.wanted.Load() && n.image.pushed.CompareAndSwap(false, true) {
		n.server.push(n)
	}
	var thread int // the kernel's name for who touches the page: not of its process
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
