package memory

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sparse"
)

// BaseStore keeps the bases of a host: immutable RAM images, one sparse file each. It knows who uses a base in this process,
// not which checkpoints name it: the caller decides when one is removed.
//
// A VMM that can map a read-only file gets the file itself. One that opens its memory file for writing (QEMU before 8.2) gets
// a frozen memfd with the same bytes, which nobody can write; the memfd is made when it is first wanted and kept while in use.
type BaseStore struct {
	dir      string
	frozen   bool
	arriving Arriving

	mu   sync.Mutex // guards open and the fields of its bases
	open map[core.BaseID]*Base
}

// Arriving are bases that are not whole: something else shows what there is of them, and puts the file into the store's directory when it
// is.
type Arriving interface {
	// Open opens a file that has the base's bytes, though reading some may take long; fs.ErrNotExist when it does not arrive.
	Open(id core.BaseID) (*os.File, error)
	List() []core.BaseID
	// Remove gives one up. An absent one is no error.
	Remove(id core.BaseID) error
}

// Base is one open base. Every Open, Zero and Rebase must be paired with a Close.
type Base struct {
	ID   core.BaseID // empty for the all-zero base of a cold boot
	Size int64       // bytes of RAM

	store    *BaseStore
	file     *os.File // what a VMM maps
	arriving bool     // it is of Arriving
	refs     int
	ready    chan struct{} // closed when file or err is set
	err      error
}

// NewBaseStore opens the store in dir. frozen says that the VMM needs memfds.
func NewBaseStore(dir string, frozen bool) (*BaseStore, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	leftovers, err := filepath.Glob(filepath.Join(dir, "*.part"))
	if err != nil {
		return nil, err
	}
	for _, l := range leftovers {
		if err := os.Remove(l); err != nil {
			return nil, err
		}
	}
	return &BaseStore{dir: dir, frozen: frozen, open: make(map[core.BaseID]*Base)}, nil
}

// Await tells the store of bases that arrive. It is called before anything else.
func (s *BaseStore) Await(a Arriving) { s.arriving = a }

func (s *BaseStore) path(id core.BaseID) string { return filepath.Join(s.dir, string(id)+".ram") }

// Name is where the file of a base is, below the directory above the store's.
func (s *BaseStore) Name(id core.BaseID) string {
	return filepath.Join(filepath.Base(s.dir), filepath.Base(s.path(id)))
}

// Zero returns the base of a cold boot: size bytes of zeros that take no memory.
func (s *BaseStore) Zero(size int64) (*Base, error) {
	f, err := s.zeroFile(size)
	if err != nil {
		return nil, err
	}
	return &Base{Size: size, file: f}, nil
}

func (s *BaseStore) zeroFile(size int64) (_ *os.File, err error) {
	if s.frozen {
		f, err := newMemfd("coppice-zero", size)
		if err != nil {
			return nil, err
		}
		if err := freeze(f); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return f, nil
	}
	// A file without a name, but one of a real file system: Landlock knows no other, and a VMM that uses it opens the file again.
	made, err := os.CreateTemp(s.dir, "zero-*.part")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, made.Close(), os.Remove(made.Name())) }()
	if err := errors.Join(made.Truncate(size), made.Chmod(0o444)); err != nil {
		return nil, err
	}
	return os.Open(made.Name())
}

// Open opens a base. Several may open one at the same time; its bytes are in memory once.
func (s *BaseStore) Open(id core.BaseID) (*Base, error) {
	s.mu.Lock()
	if b, ok := s.open[id]; ok {
		b.refs++
		s.mu.Unlock()
		<-b.ready
		if b.err != nil {
			return nil, errors.Join(b.err, b.Close())
		}
		return b, nil
	}
	b := &Base{ID: id, store: s, refs: 1, ready: make(chan struct{})}
	s.open[id] = b
	s.mu.Unlock()
	b.file, b.Size, b.arriving, b.err = s.load(id)
	close(b.ready)
	if b.err != nil {
		return nil, errors.Join(b.err, b.Close())
	}
	return b, nil
}

// Adopt opens a base that a machine of an earlier process maps. If the machine has a memfd open, Adopt opens the same file: so its bytes
// are in memory only once, and it has the same file seals.
func (s *BaseStore) Adopt(id core.BaseID, pid int, inode uint64) (*Base, error) {
	if !s.frozen {
		return s.Open(id)
	}
	f, err := findFrozen(pid, inode)
	if err != nil {
		return s.Open(id)
	}
	info, err := f.Stat()
	s.mu.Lock()
	if _, there := s.open[id]; there || err != nil {
		s.mu.Unlock()
		_ = f.Close() // another machine had it first
		return s.Open(id)
	}
	defer s.mu.Unlock()
	b := &Base{ID: id, Size: info.Size(), store: s, file: f, refs: 1, ready: make(chan struct{})}
	close(b.ready)
	s.open[id] = b
	return b, nil
}

// findFrozen opens the frozen memfd with an inode that a process has open. The number belongs to one memfd until the host is
// restarted, so the process cannot pass off another.
func findFrozen(pid int, inode uint64) (*os.File, error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	memfds, err := memfdDevice()
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		var st unix.Stat_t
		path := filepath.Join(dir, e.Name())
		if unix.Stat(path, &st) != nil || st.Ino != inode || st.Dev != memfds {
			continue
		}
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		if seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0); err != nil || seals&allSeals != allSeals {
			return nil, errors.Join(fmt.Errorf("%s is not frozen", path), err, f.Close())
		}
		return f, nil
	}
	return nil, fs.ErrNotExist
}

// memfdDevice is the device that all memfds are on.
func memfdDevice() (uint64, error) {
	f, err := newMemfd("coppice-probe", 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var st unix.Stat_t
	err = unix.Fstat(int(f.Fd()), &st)
	return st.Dev, err
}

func (s *BaseStore) load(id core.BaseID) (_ *os.File, size int64, arriving bool, err error) {
	f, arriving, err := s.find(id)
	if err != nil {
		return nil, 0, false, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, 0, false, errors.Join(err, f.Close())
	}
	if !s.frozen || arriving { // a base that is still arriving cannot be written through its descriptor
		return f, info.Size(), arriving, nil
	}
	defer f.Close()
	m, err := newMemfd(string(id), info.Size())
	if err != nil {
		return nil, 0, false, err
	}
	if err := sparse.Copy(m, f, info.Size()); err != nil {
		return nil, 0, false, errors.Join(fmt.Errorf("load base %s: %w", id, err), m.Close())
	}
	if err := freeze(m); err != nil {
		return nil, 0, false, errors.Join(err, m.Close())
	}
	return m, info.Size(), false, nil
}

// find opens the file of a base, or what there is of one that arrives.
func (s *BaseStore) find(id core.BaseID) (_ *os.File, arriving bool, err error) {
	for range 2 { // it may become whole in between
		f, err := os.Open(s.path(id))
		if !errors.Is(err, fs.ErrNotExist) {
			return f, false, err
		}
		if s.arriving == nil {
			break
		}
		if f, err = s.arriving.Open(id); !errors.Is(err, fs.ErrNotExist) {
			return f, true, err
		}
	}
	return nil, false, core.Errorf(core.DataLoss, core.CodeCheckpointCorrupt, "the memory base %s is missing on this host", id)
}

// ForgetArriving forgets open bases that are still arriving, because the process that served them is gone. The next caller opens them
// again.
func (s *BaseStore) ForgetArriving() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, b := range s.open {
		select {
		case <-b.ready:
			if b.arriving {
				delete(s.open, id)
			}
		default:
		}
	}
}

// Rebase writes base plus delta as a new base, durably, and opens it. Pages that are zero in the result are holes. It reads and writes
// sequentially and does not disturb users of the old base.
func (s *BaseStore) Rebase(from *Base, d *Delta) (*Base, error) {
	if from.Size != d.Size {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "a delta of %d bytes of RAM cannot be rebased onto %d", d.Size, from.Size)
	}
	id, err := s.Import(from.Size, func(f *os.File) error { return writeImage(f, from, d) })
	if err != nil {
		return nil, err
	}
	b, err := s.Open(id)
	if err != nil {
		return nil, errors.Join(err, s.Remove(id))
	}
	return b, nil
}

func writeImage(f *os.File, from *Base, d *Delta) error {
	if from.ID != "" {
		src, err := os.Open(from.store.path(from.ID))
		if errors.Is(err, fs.ErrNotExist) { // removed, but in use
			err = sparse.Copy(f, from.file, from.Size)
		} else if err == nil {
			_, err = sparse.Clone(f, src)
			err = errors.Join(err, src.Close())
		}
		if err != nil {
			return err
		}
	}
	fresh := from.ID == ""
	return guardFaults(func() error {
		return d.Each(func(e Extent, data []byte) error { return writePages(f, e.Offset, data, fresh) })
	})
}

var zeroPage [PageSize]byte

// writePages writes data at off. All-zero pages become holes; in a fresh file, which has nothing else, they are left out.
func writePages(f *os.File, off int64, data []byte, fresh bool) error {
	for len(data) > 0 {
		zero := bytes.Equal(data[:PageSize], zeroPage[:])
		n := PageSize
		for n < len(data) && bytes.Equal(data[n:n+PageSize], zeroPage[:]) == zero {
			n += PageSize
		}
		var err error
		switch {
		case !zero:
			_, err = f.WriteAt(data[:n], off)
		case !fresh:
			err = sparse.Zero(f, off, int64(n))
		}
		if err != nil {
			return err
		}
		data, off = data[n:], off+int64(n)
	}
	return nil
}

// List returns the ids of all bases on disk, and of those that arrive.
func (s *BaseStore) List() ([]core.BaseID, error) {
	names, err := filepath.Glob(filepath.Join(s.dir, "*.ram"))
	if err != nil {
		return nil, err
	}
	var ids []core.BaseID
	for _, n := range names {
		name := filepath.Base(n)
		if id, err := core.ParseID[core.BaseID](name[:len(name)-len(".ram")]); err == nil {
			ids = append(ids, id)
		}
	}
	if s.arriving != nil {
		ids = append(ids, s.arriving.List()...)
	}
	return ids, nil
}

// Remove deletes a base from disk. Machines that map it keep it until they end. Removing an absent base is no error.
func (s *BaseStore) Remove(id core.BaseID) error {
	err := os.Remove(s.path(id))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if s.arriving != nil {
		err = errors.Join(err, s.arriving.Remove(id))
	}
	return err
}

// AllocatedBytes returns what the base takes on disk.
func (s *BaseStore) AllocatedBytes(id core.BaseID) (int64, error) {
	var st unix.Stat_t
	if err := unix.Stat(s.path(id), &st); err != nil {
		return 0, err
	}
	return st.Blocks * 512, nil
}

// Shown is memory that something else shows by a file, for one machine: it has no name and is in no store. The file is the base's.
func Shown(size int64, f *os.File) *Base { return &Base{Size: size, file: f, arriving: true} }

// File returns what a VMM maps. It belongs to the base.
func (b *Base) File() *os.File { return b.file }

// Arriving reports whether the file is shown by something else, and is broken when that ends.
func (b *Base) Arriving() bool { return b.arriving }

// Close gives the base back. The last user's Close frees a memfd.
func (b *Base) Close() error {
	if b.store == nil {
		return b.file.Close()
	}
	b.store.mu.Lock()
	b.refs--
	last := b.refs == 0
	if last && b.store.open[b.ID] == b {
		delete(b.store.open, b.ID)
	}
	b.store.mu.Unlock()
	if !last || b.file == nil {
		return nil
	}
	if err := b.file.Close(); !b.arriving {
		return err
	}
	return nil // the end of whatever has shown it is told by others
}

func newMemfd(name string, size int64) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make a memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := f.Truncate(size); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// FileOf returns a memfd with the bytes, at its beginning.
func FileOf(name string, b []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.WriteAt(b, 0); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

const allSeals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// freeze makes a memfd immutable for everybody who has it open, for ever.
func freeze(f *os.File) error {
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, allSeals); err != nil {
		return fmt.Errorf("freeze a memfd: %w", err)
	}
	return nil
}
