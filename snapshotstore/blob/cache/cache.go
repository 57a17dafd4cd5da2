// Package cache keeps bytes of a store's objects on this host. It is a blob.Blobs in front of
// another one, for all checkpoints of the host and for several processes at once.
//
// An object has one sparse file, named by the hash of its key, with the present bytes at their own
// offsets. The file itself says which ranges are present (SEEK_HOLE), in whole blocks, so there is
// no index that could disagree with it after a kill. Missing bytes are read from the store behind
// and written into their place. A file's mtime is its last use. Whole files are evicted, oldest
// first, by the process that is about to exceed the budget.
//
// The cache verifies nothing and nothing depends on it: a reader compares digests, and reports
// wrong bytes with Forget. A full or broken disk costs only reads of the store.
package cache

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// window is the largest single read, in bytes; a larger read is split into windows.
const window = 4 << 20

// Config configures a cache.
type Config struct {
	Dir     string // absolute; created if it is missing. Its parent must exist
	Budget  int64  // maximum bytes on the disk
	Spare   int64  // bytes of the file system to leave free for others
	Behind  blob.Blobs
	Log     *slog.Logger
	Metrics prometheus.Registerer // nil: not registered
}

// Cache is a store in front of another store. It reports what that store knows about objects, and its errors.
type Cache struct {
	blob.Blobs // the store behind the cache

	cfg     Config
	root    *os.Root
	block   int64 // the unit in which the file system reports holes
	count   metrics
	account account

	mu      sync.Mutex // guards flights
	flights map[span]*flight
}

var (
	_ blob.Blobs     = (*Cache)(nil)
	_ blob.Forgetter = (*Cache)(nil)
)

// Open opens a cache in a directory. Other processes may have it open too. UNSUPPORTED if the file system does not
// report holes.
func Open(cfg Config) (*Cache, error) {
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(cfg.Dir)
	if err != nil {
		return nil, err
	}
	c := &Cache{Blobs: cfg.Behind, cfg: cfg, root: root, flights: make(map[span]*flight)}
	if c.block, err = probe(root); err == nil {
		err = c.account.open(root)
	}
	if err == nil && cfg.Metrics != nil {
		err = c.count.register(cfg.Metrics, c.Used)
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	c.trim()
	return c, nil
}

// Close closes the directory, but not the store behind. It must be the last call.
func (c *Cache) Close() error { return errors.Join(c.account.close(), c.root.Close()) }

// Get implements blob.Blobs.
func (c *Cache) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if err := blob.CheckGet(key, off, n); err != nil {
		return nil, err
	}
	if n == 0 || off >= maxObject {
		return c.Blobs.Get(ctx, key, off, n)
	}
	b := &body{ctx: ctx, cache: c, key: key, at: off, left: n}
	if err := b.load(); err != nil { // now, because Get must report a missing object
		return nil, err
	}
	return b, nil
}

// Cached returns a range only if all of it is in the cache, or the whole part that lies within the object.
func (c *Cache) Cached(key string, off, n int64) ([]byte, bool) {
	if blob.CheckGet(key, off, n) != nil || n > window {
		return nil, false
	}
	f := c.open(key)
	if f == nil {
		return nil, false
	}
	defer f.Close()
	b, err := f.read(off, n)
	if err != nil {
		c.broken(key, err)
	}
	return b, b != nil
}

// Put implements blob.Blobs. It also keeps the stored bytes in the cache.
func (c *Cache) Put(ctx context.Context, key string, from io.ReaderAt, size int64, digest core.Digest) error {
	if err := blob.CheckPut(key, size, digest); err != nil {
		return err
	}
	var f *file
	if size > 0 && size < maxObject {
		f = c.make(key) // before it is stored: see Delete
	}
	if f == nil {
		return c.Blobs.Put(ctx, key, from, size, digest)
	}
	defer f.Close()
	if err := c.Blobs.Put(ctx, key, from, size, digest); err != nil {
		if f.fresh {
			c.drop(key)
		}
		return err
	}
	if !c.reserve(size) {
		return nil
	}
	buf := make([]byte, min(size, window))
	for off := int64(0); off < size; off += int64(len(buf)) {
		part := buf[:min(int64(len(buf)), size-off)]
		if n, _ := from.ReadAt(part, off); n < len(part) { // the object is stored all the same
			return nil
		}
		if !c.write(f, key, off, part, size) {
			return nil
		}
	}
	return nil
}

// Delete implements blob.Blobs. A concurrent reader has opened the object's file before it asked the store. So whatever
// it writes later goes into a file that no longer has a name.
func (c *Cache) Delete(ctx context.Context, keys ...string) error {
	err := c.Blobs.Delete(ctx, keys...)
	c.mu.Lock()
	maps.DeleteFunc(c.flights, func(s span, _ *flight) bool { return slices.Contains(keys, s.key) }) // no new reader joins them
	c.mu.Unlock()
	for _, key := range keys {
		if blob.ValidKey(key) {
			c.drop(key)
		}
	}
	return err
}

// Forget implements blob.Forgetter. It reads the range once from the store behind. If the store has other bytes, the
// cached bytes have rotted and are replaced. If the bytes are the same, the store is at fault.
func (c *Cache) Forget(ctx context.Context, key string, off, n int64) {
	blob.Forget(ctx, c.Blobs, key, off, n)
	for end := off + n; off < end; off += window {
		if !c.refresh(ctx, key, off, min(window, end-off)) {
			return
		}
	}
}

func (c *Cache) refresh(ctx context.Context, key string, off, n int64) bool {
	f := c.open(key)
	if f == nil {
		return false
	}
	defer f.Close()
	was, err := f.read(off, n)
	var now []byte
	if err == nil && was != nil {
		now, err = readAll(ctx, c.Blobs, key, off, n)
	}
	if err != nil || was == nil { // a part of it may be in the cache
		c.drop(key)
		return false
	}
	if bytes.Equal(was, now) {
		return true
	}
	c.count.rot.Add(1)
	c.cfg.Log.WarnContext(ctx, "the cache had other bytes than the store; they were replaced", "object", key, "offset", off, "bytes", n)
	if len(was) != len(now) || f.writeAt(now, off) != nil {
		c.drop(key)
		return false
	}
	return true
}

// body is the body of a Get.
type body struct {
	ctx   context.Context // the context of the Get, also for reads of its body
	cache *Cache
	key   string
	at    int64  // offset in the object, after buf
	left  int64  // bytes after buf
	buf   []byte // not returned yet
}

func (b *body) load() error {
	n := min(b.left, b.at-b.at%b.cache.block+window-b.at)
	got, err := b.cache.get(b.ctx, b.key, b.at, n)
	if err != nil {
		return err
	}
	b.buf, b.at, b.left = got, b.at+int64(len(got)), b.left-int64(len(got))
	if int64(len(got)) < n { // the object ends here
		b.left = 0
	}
	return nil
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	if b.ctx.Err() != nil {
		return 0, context.Cause(b.ctx)
	}
	if len(b.buf) == 0 && b.left > 0 {
		if err := b.load(); err != nil {
			return 0, err
		}
	}
	if len(b.buf) == 0 {
		return 0, io.EOF
	}
	n := copy(p, b.buf)
	b.buf = b.buf[n:]
	return n, nil
}

// Close implements io.Closer.
func (b *body) Close() error { return nil }

// span is a range in whole blocks.
type span struct {
	key      string
	from, to int64
}

// flight is a read of the store that others wait for.
type flight struct {
	done chan struct{}
	data []byte
	err  error
}

// get returns a range of at most one window, or less if the object ends before.
func (c *Cache) get(ctx context.Context, key string, off, n int64) ([]byte, error) {
	if b, ok := c.Cached(key, off, n); ok {
		c.count.hits.Add(1)
		c.count.fromCache.Add(int64(len(b)))
		return b, nil
	}
	s := span{key, off - off%c.block, off + n + (c.block-(off+n)%c.block)%c.block}
	for {
		b, own, err := c.fly(ctx, s)
		if err != nil && !own && ctx.Err() == nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, blob.ErrNotFound)) {
			continue // the other reader's context ended, or the object did not exist when it asked
		}
		if err != nil {
			return nil, err
		}
		b = b[min(int64(len(b)), off-s.from):]
		return b[:min(int64(len(b)), n)], nil
	}
}

// fly fills a span, or waits for another reader that is filling it. own reports whether the error is this reader's own.
func (c *Cache) fly(ctx context.Context, s span) (_ []byte, own bool, err error) {
	c.mu.Lock()
	f, there := c.flights[s]
	if !there {
		f = &flight{done: make(chan struct{})}
		c.flights[s] = f
	}
	c.mu.Unlock()
	if there {
		select {
		case <-f.done:
			return f.data, false, f.err
		case <-ctx.Done():
			return nil, true, context.Cause(ctx)
		}
	}
	f.data, f.err = c.fill(ctx, s)
	c.mu.Lock()
	if c.flights[s] == f {
		delete(c.flights, s)
	}
	c.mu.Unlock()
	close(f.done)
	return f.data, true, f.err
}

// fill reads the missing part of a span with one request, and caches it.
func (c *Cache) fill(ctx context.Context, s span) ([]byte, error) {
	c.count.misses.Add(1)
	f := c.make(s.key) // before the store is asked: see Delete
	if f == nil {
		return readAll(ctx, c.Blobs, s.key, s.from, s.to-s.from)
	}
	defer f.Close()
	buf, lo, hi := f.around(s)
	got, err := readInto(ctx, c.Blobs, s.key, lo, buf[lo-s.from:hi-s.from])
	if err != nil {
		if f.fresh {
			c.drop(s.key)
		}
		return nil, err
	}
	c.count.fromBehind.Add(int64(got))
	size := f.size
	if end := lo + int64(got); end < hi { // the object ends here, or before lo if no bytes came
		buf = buf[:end-s.from]
		if hi = end; got > 0 {
			size = end
		}
	}
	if got > 0 && c.reserve(hi-lo) {
		c.write(f, s.key, lo, buf[lo-s.from:hi-s.from], size)
	}
	return buf, nil
}

// write caches bytes of an object; size is the object's size, or maxObject if it is unknown.
func (c *Cache) write(f *file, key string, off int64, b []byte, size int64) bool {
	err := f.end(size)
	if err == nil {
		err = f.writeAt(b, off)
	}
	if err != nil {
		c.broken(key, err)
	}
	return err == nil
}

// broken drops the cached part of an object, because its file cannot be read or written.
func (c *Cache) broken(key string, err error) {
	c.count.failures.Add(1)
	c.cfg.Log.Debug("the cache cannot keep an object", "object", key, "err", err)
	c.drop(key)
}

// readAll reads a range from a store, or less if the object ends before.
func readAll(ctx context.Context, from blob.Blobs, key string, off, n int64) ([]byte, error) {
	b := make([]byte, n)
	got, err := readInto(ctx, from, key, off, b)
	return b[:got], err
}

func readInto(ctx context.Context, from blob.Blobs, key string, off int64, b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	r, err := from.Get(ctx, key, off, int64(len(b)))
	if err != nil {
		return 0, err
	}
	got := 0
	for got < len(b) && err == nil {
		var n int
		n, err = r.Read(b[got:])
		got += n
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return got, errors.Join(err, r.Close())
}
