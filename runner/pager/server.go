package pager

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/peers"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// Config configures a pager. Every field except Version is required.
type Config struct {
	Dir   string // for the socket and the mount point; only this pager uses it
	Blobs blob.Blobs
	Log   *slog.Logger

	Version int // protocol version to announce; 0: the real one. Tests use others
}

// Server is a pager.
type Server struct {
	cfg      Config
	keys     envelope.Ring // keys of the store's objects
	id       string
	listen   *net.UnixListener
	disks    *mount
	memory   *mount
	stop     context.CancelFunc
	done     context.Context
	inode    atomic.Uint64 // number of the last file
	lastMiss atomic.Int64  // see image

	mu        sync.Mutex // guards the fields below
	images    map[string]*image
	pushes    sync.WaitGroup            // none begins after done has ended
	snapshots []*snapshotstore.Snapshot // the last ones read
	gone      Totals                    // totals of images that have ended
	version   int64
	news      chan struct{} // closed when the version changes
}

// The mount points of the file systems in the pager's directory.
const (
	mountDir  = "mnt"
	memoryDir = "memory"
)

// SocketPath returns the socket of the pager in a directory.
func SocketPath(dir string) string { return sidecar.Process{Dir: dir}.SocketPath() }

// New mounts the file systems and listens.
func New(cfg Config) (_ *Server, err error) {
	s := &Server{cfg: cfg, id: rand.Text(), images: make(map[string]*image), version: 1, news: make(chan struct{})}
	s.inode.Store(1 << 40)
	s.cfg.Blobs = envelope.With(cfg.Blobs, &s.keys)
	s.done, s.stop = context.WithCancel(context.Background())
	if err := Clean(cfg.Dir); err != nil {
		return nil, fmt.Errorf("unmount the file systems of an earlier pager: %w", err)
	}
	if s.disks, err = newMount(filepath.Join(cfg.Dir, mountDir), s, false, diskReadAhead); err != nil {
		return nil, err
	}
	if s.memory, err = newMount(filepath.Join(cfg.Dir, memoryDir), s, true, memoryReadAhead); err != nil {
		return nil, errors.Join(err, s.disks.close(false))
	}
	s.listen, err = sidecar.Listen(SocketPath(cfg.Dir))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen as a pager: %w", err), s.disks.close(false), s.memory.close(false))
	}
	return s, nil
}

// Run serves until ctx ends or a client stops it.
func (s *Server) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, s.stop)()
	var wg sync.WaitGroup
	stopped := context.AfterFunc(s.done, func() { _ = s.listen.Close() })
	defer stopped()
	var failed error
	for {
		c, err := s.listen.AcceptUnix()
		if err != nil {
			if s.done.Err() == nil {
				failed = err
			}
			break
		}
		wg.Go(func() { s.converse(c) })
	}
	s.stop()
	s.mu.Lock()
	var errs []error
	open := map[bool]bool{} // key: whether the images are memory
	for _, im := range s.images {
		im.stop() // threads that wait for its pages get an error
		open[im.memory] = open[im.memory] || im.opened.Load() > 0
	}
	s.mu.Unlock()
	errs = append(errs, failed, s.disks.close(open[false]), s.memory.close(open[true]))
	s.mu.Lock()
	for _, im := range s.images {
		errs = append(errs, im.close())
	}
	s.mu.Unlock()
	wg.Wait()
	s.pushes.Wait()
	return errors.Join(errs...)
}

// converse answers one client until the client disconnects.
func (s *Server) converse(c *net.UnixConn) {
	defer c.Close()
	defer context.AfterFunc(s.done, func() { _ = c.CloseRead() })()
	for {
		var r request
		var out response
		var back *os.File
		f, err := receive(c, &r)
		switch {
		case sidecar.IsFault(err): // it gets an error as its answer, and the connection goes on
			err = sidecar.Fault(err)
		case err != nil:
			if !errors.Is(err, io.EOF) && s.done.Err() == nil {
				s.cfg.Log.Warn("a client's message was not received", "err", err)
			}
			return
		default:
			out, back, err = s.answer(r, f)
		}
		if err != nil {
			out = response{Problem: problemOf(err)}
		}
		err = sidecar.Send(c, out, listOf(back)...)
		if sidecar.IsFault(err) {
			s.cfg.Log.Error("an answer was not sent", "op", core.Clip(string(r.Op)), "err", err)
			err = sidecar.Send(c, response{Problem: problemOf(sidecar.Fault(err))})
		}
		if back != nil {
			err = errors.Join(err, back.Close())
		}
		if r.Op == opStop {
			s.stop()
		}
		if err != nil {
			return
		}
	}
}

// answer executes a request. It owns f; the caller owns the returned file.
func (s *Server) answer(r request, f *os.File) (response, *os.File, error) {
	if r.Op == opPut && r.Image != nil && f != nil {
		st, err := s.put(*r.Image, f)
		return response{Status: &st}, nil, err
	}
	if f != nil {
		_ = f.Close() // the request does not use it
	}
	switch r.Op {
	case opHello:
		return response{Hello: &Hello{PID: os.Getpid(), Instance: s.id, Version: cmp.Or(s.cfg.Version, ProtocolVersion)}}, nil, nil
	case opDir:
		m := s.disks
		if im := s.image(r.ID); im != nil && im.memory {
			m = s.memory
		}
		f, err := dup(m.fd)
		return response{}, f, err
	case opKeys:
		s.keys.Add(r.Keys)
		return response{}, nil, nil
	case opDrop:
		return response{}, nil, s.drop(r.ID)
	case opTaken:
		if im := s.image(r.ID); im != nil {
			im.taken.Store(true)
			s.retire(im)
		}
		return response{}, nil, nil
	case opTouched:
		im := s.image(r.ID)
		if im == nil {
			return response{}, nil, nil
		}
		const most = 4096
		touched := im.touchedRanges()
		return response{Touched: touched[:min(len(touched), most)]}, nil, nil
	case opWatch:
		return s.watch(r.Version, r.After), nil, nil
	case opStop:
		return response{}, nil, nil
	case opPut:
	}
	return response{}, nil, core.Errorf(core.Invalid, core.CodeInvalidField, "the pager does not know the request %q", core.Clip(string(r.Op)))
}

// dup returns another descriptor of a file.
func dup(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

func (s *Server) image(id string) *image {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.images[id]
}

// put begins to serve an image.
func (s *Server) put(spec Image, part *os.File) (_ Status, err error) {
	keep := false
	defer func() {
		if !keep {
			err = errors.Join(err, part.Close())
		}
	}()
	if spec.ID == "" || len(spec.ID) > maxID || strings.ContainsRune(spec.ID, '/') {
		return Status{}, core.Errorf(core.Invalid, core.CodeInvalidField, "%q cannot be the name of an image", core.Clip(spec.ID))
	}
	if im := s.image(spec.ID); im != nil {
		return im.status(), nil
	}
	im, err := s.newImage(spec, part)
	if err != nil {
		return Status{}, err
	}
	im.want, im.memory, im.record = spec.Want, spec.Memory, spec.Record
	s.mu.Lock()
	if other := s.images[spec.ID]; other != nil {
		s.mu.Unlock()
		return other.status(), nil
	}
	s.images[spec.ID] = im
	s.mu.Unlock()
	keep = true
	if !im.record {
		go func() {
			im.run()
			s.retire(im)
		}()
	}
	s.changed()
	return im.status(), nil
}

func (s *Server) newImage(spec Image, part *os.File) (*image, error) {
	ctx := peers.With(s.done, spec.Peers)
	if spec.Record {
		return s.newRecord(ctx, spec, part)
	}
	snapshot, err := s.snapshot(ctx, spec.Source)
	if err != nil {
		return nil, err
	}
	tree := snapshot.Image(spec.Source.Image)
	info, err := part.Stat()
	if err != nil {
		return nil, err
	}
	if tree == nil || tree.Size() != info.Size() {
		return nil, core.Errorf(core.DataLoss, core.CodeManifestInvalid, "the manifest of checkpoint %s has no image %s of %d bytes", spec.Source.CheckpointID, spec.Source.Image, info.Size())
	}
	ino := s.inode.Add(1) // the runner finds the file in a machine's mappings by this number; no library of a VMM has it
	inode := info.Sys().(*syscall.Stat_t).Ino
	if spec.Seed == nil {
		return newImage(ctx, spec.ID, tree, nil, part, inode, ino, s.cfg.Blobs, s.cfg.Log, &s.lastMiss, s.changed), nil
	}
	seed, err := s.snapshot(ctx, *spec.Seed)
	if err != nil {
		return nil, err
	}
	from := seed.Image(spec.Seed.Image)
	if from == nil || from.Size() != tree.Size() {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "checkpoint %s cannot be the seed of checkpoint %s", spec.Seed.CheckpointID, spec.Source.CheckpointID)
	}
	if err := clearZeros(part, tree, from); err != nil {
		return nil, err
	}
	return newImage(ctx, spec.ID, tree, from, part, inode, ino, s.cfg.Blobs, s.cfg.Log, &s.lastMiss, s.changed), nil
}

// newRecord makes an image from part, which has all its bytes.
func (s *Server) newRecord(ctx context.Context, spec Image, part *os.File) (*image, error) {
	info, err := part.Stat()
	if err != nil {
		return nil, err
	}
	if spec.Source != (Source{}) || spec.Seed != nil || info.Size() == 0 || info.Size()%pageSize != 0 {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "the image %s, of %d bytes, cannot be recorded", core.Clip(spec.ID), info.Size())
	}
	tree := manifest.NewTree(info.Size()) // nothing of it is in the store
	inode := info.Sys().(*syscall.Stat_t).Ino
	return newImage(ctx, spec.ID, tree, nil, part, inode, s.inode.Add(1), s.cfg.Blobs, s.cfg.Log, &s.lastMiss, s.changed), nil
}

const keptSnapshots = 4

func (s *Server) snapshot(ctx context.Context, src Source) (*snapshotstore.Snapshot, error) {
	found, err := s.findSnapshot(ctx, src)
	if err == nil && found.Header().CheckpointID != src.CheckpointID {
		return nil, core.Errorf(core.DataLoss, core.CodeManifestInvalid, "the manifest of checkpoint %s is that of %s", src.CheckpointID, found.Header().CheckpointID)
	}
	return found, err
}

func (s *Server) findSnapshot(ctx context.Context, src Source) (*snapshotstore.Snapshot, error) {
	s.mu.Lock()
	for _, old := range s.snapshots {
		if old.Ref() == src.Manifest {
			s.mu.Unlock()
			return old, nil
		}
	}
	s.mu.Unlock()
	fresh, err := snapshotstore.Open(ctx, s.cfg.Blobs, src.Manifest)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.snapshots = append(s.snapshots, fresh)
	if len(s.snapshots) > keptSnapshots {
		s.snapshots = slices.Delete(s.snapshots, 0, 1)
	}
	return fresh, nil
}

// retire removes an image that is no longer needed: it is complete, nobody has it open, and it was taken. An image that
// was not taken would be put again, and fetched a second time.
func (s *Server) retire(im *image) {
	s.mu.Lock()
	gone := im.whole.Load() && im.taken.Load() && im.opened.Load() == 0 && s.images[im.id] == im
	if gone {
		delete(s.images, im.id)
	}
	s.mu.Unlock()
	if !gone {
		s.changed()
	} else if err := s.end(im); err != nil {
		s.cfg.Log.Warn("an image was not closed", "image", im.id, "err", err)
	}
}

func (s *Server) drop(id string) error {
	s.mu.Lock()
	im := s.images[id]
	delete(s.images, id)
	s.mu.Unlock()
	if im == nil {
		return nil
	}
	return s.end(im)
}

func (s *Server) end(im *image) error {
	st := im.status()
	s.mu.Lock()
	s.gone.add(st)
	s.mu.Unlock()
	s.changed()
	return im.close()
}

// changed wakes the watchers.
func (s *Server) changed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	close(s.news)
	s.news = make(chan struct{})
}

// watch waits for a version other than the given one, or does not wait if after is set. It returns as many images after
// that id as fit into a message. The totals are in the first part.
func (s *Server) watch(version int64, after string) response {
	s.mu.Lock()
	for after == "" && s.version == version && s.done.Err() == nil {
		news := s.news
		s.mu.Unlock()
		select {
		case <-news:
		case <-s.done.Done():
		}
		s.mu.Lock()
	}
	totals := s.gone
	out := response{Version: s.version}
	images := slices.SortedFunc(maps.Values(s.images), func(a, b *image) int { return cmp.Compare(a.id, b.id) })
	s.mu.Unlock()
	first, size := after == "", 0
	if first {
		out.Totals = &totals
	}
	for _, im := range images {
		if im.id <= after {
			continue
		}
		if out.More && !first {
			break
		}
		st := im.status()
		if totals.add(st); out.More {
			continue
		}
		encoded, err := json.Marshal(st)
		if size += len(encoded) + 1; err != nil || size > maxStatusBytes && len(out.Images) > 0 {
			out.More = true
			continue
		}
		out.Images = append(out.Images, st)
	}
	return out
}
