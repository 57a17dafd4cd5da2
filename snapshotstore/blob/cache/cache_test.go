package cache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/tests3"
	"github.com/coppice-dev/coppice/runner/volume"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/blobtest"
	"github.com/coppice-dev/coppice/snapshotstore/blob/bloburl"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
	"github.com/coppice-dev/coppice/snapshotstore/blob/s3"
)

const readerEnv = "CACHE_TEST_DIR" // makes the test binary read for ever through a cache in this directory

func TestMain(m *testing.M) {
	if path := os.Getenv(readerEnv); path != "" {
		readForEver(path)
	}
	testleak.Main(m)
}

// counted counts the requests to a store, and delays its Gets until the channel hold is closed.
type counted struct {
	blob.Blobs
	gets atomic.Int64
	read atomic.Int64
	hold chan struct{}
	came chan struct{}
}

func (c *counted) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	c.gets.Add(1)
	c.read.Add(n)
	if c.hold != nil {
		c.came <- struct{}{}
		select {
		case <-c.hold:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return c.Blobs.Get(ctx, key, off, n)
}

func files(tb testing.TB) *dir.Store {
	tb.Helper()
	s, err := dir.Open(filepath.Join(tb.TempDir(), "store"))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = s.Close() })
	return s
}

func open(tb testing.TB, path string, budget int64, behind blob.Blobs) *Cache {
	tb.Helper()
	c, err := Open(Config{Dir: path, Budget: budget, Behind: behind, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := c.Close(); err != nil {
			tb.Error(err)
		}
	})
	return c
}

// TestSuite runs the suite of the backends with a cache in front of each, with room for everything and with little
// room.
func TestSuite(t *testing.T) {
	t.Parallel()
	for name, budget := range map[string]int64{"room": 1 << 30, "little room": 1 << 20} {
		t.Run(name+" on a directory", func(t *testing.T) {
			t.Parallel()
			blobtest.Run(t, func(tb testing.TB) blobtest.Store {
				tb.Helper()
				path := filepath.Join(tb.TempDir(), "store")
				s, err := dir.Open(path)
				if err != nil {
					tb.Fatal(err)
				}
				tb.Cleanup(func() { _ = s.Close() })
				tmp := filepath.Join(path, ".tmp")
				return blobtest.Store{
					Blobs: open(tb, tb.TempDir(), budget, s),
					Abandon: func(tb testing.TB, key string) {
						tb.Helper()
						if err := os.WriteFile(filepath.Join(tmp, strings.ReplaceAll(key, "/", "-")), []byte("part"), 0o600); err != nil {
							tb.Fatal(err)
						}
					},
					Leftovers: func(tb testing.TB) int {
						tb.Helper()
						entries, err := os.ReadDir(tmp)
						if err != nil {
							tb.Fatal(err)
						}
						return len(entries)
					},
				}
			})
		})
	}
	t.Run("room on S3", func(t *testing.T) {
		t.Parallel()
		server := tests3.Start(t)
		blobtest.Run(t, func(tb testing.TB) blobtest.Store {
			tb.Helper()
			bucket, client := server.Bucket(tb), server.Client(tb)
			s, err := bloburl.Dial(server.URL(bucket), s3.Credentials{AccessKey: server.AccessKey, SecretKey: server.SecretKey})
			if err != nil {
				tb.Fatal(err)
			}
			tb.Cleanup(func() { _ = s.Close() })
			return blobtest.Store{
				Blobs: open(tb, tb.TempDir(), 1<<30, s),
				Abandon: func(tb testing.TB, key string) {
					tb.Helper()
					if _, err := client.NewMultipartUpload(tb.Context(), bucket, key, minio.PutObjectOptions{}); err != nil {
						tb.Fatal(err)
					}
				},
				Leftovers: func(tb testing.TB) int {
					tb.Helper()
					found, err := client.ListMultipartUploads(tb.Context(), bucket, "", "", "", "", 1000)
					if err != nil {
						tb.Fatal(err)
					}
					return len(found.Uploads)
				},
			}
		})
	})
}

// eachFileSystem runs a test on the file system of temporary files, and on XFS, the file system of runners.
func eachFileSystem(t *testing.T, test func(t *testing.T, path string)) {
	t.Helper()
	t.Run("temporary directory", func(t *testing.T) {
		t.Parallel()
		test(t, t.TempDir())
	})
	t.Run("xfs", func(t *testing.T) {
		t.Parallel()
		require.Root(t)
		require.Program(t, "mkfs.xfs", "xfsprogs")
		v, err := volume.Open(t.Context(), t.TempDir(), volume.MinBudget, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := v.Close(); err != nil {
				t.Error(err)
			}
		})
		test(t, v.Path)
	})
}

const objects, objectSize = 4, 3<<20 + 777

func object(i int) (string, []byte) {
	return fmt.Sprintf("v1/p/c/%d", i), blobtest.Bytes(uint64(i), objectSize)
}

func fillStore(t *testing.T, s blob.Blobs) {
	t.Helper()
	for i := range objects {
		key, data := object(i)
		if err := blobtest.Put(t.Context(), s, key, data); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRanges reads at random through two caches on one directory, like two processes. The bytes are always right, none
// are requested twice except at edges, and in the end no request is left.
func TestRanges(t *testing.T) {
	t.Parallel()
	eachFileSystem(t, func(t *testing.T, path string) {
		t.Helper()
		behind := &counted{Blobs: files(t)}
		fillStore(t, behind)
		caches := []*Cache{open(t, path, 1<<30, behind), open(t, path, 1<<30, behind)}
		var g errgroup.Group
		for w := range 4 {
			g.Go(func() error {
				random := rand.New(rand.NewPCG(7, uint64(w)))
				for range 60 {
					key, data := object(random.IntN(objects))
					off := random.Int64N(objectSize + 1000)
					n := random.Int64N(200_000)
					got, err := blobtest.Get(t.Context(), caches[random.IntN(2)], key, off, n)
					if want := data[min(off, objectSize):min(off+n, objectSize)]; err != nil || !bytes.Equal(got, want) {
						return fmt.Errorf("%d bytes from %d on of %s: %d, %w", n, off, key, len(got), err)
					}
				}
				return nil
			})
		}
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}
		for i := range objects {
			key, data := object(i)
			got, err := blobtest.Get(t.Context(), caches[0], key, 0, 1<<40)
			if err != nil || !bytes.Equal(got, data) {
				t.Errorf("%s: %d bytes, %v", key, len(got), err)
			}
		}
		asked := behind.gets.Load()
		for i := range objects {
			key, data := object(i)
			got, err := blobtest.Get(t.Context(), caches[1], key, 0, 1<<40)
			if err != nil || !bytes.Equal(got, data) {
				t.Errorf("%s: %d bytes, %v", key, len(got), err)
			}
		}
		if more := behind.gets.Load() - asked; more > 0 {
			t.Errorf("%d requests for what was there", more)
		}
		for _, c := range caches {
			if n := c.count.failures.Load() + c.count.rot.Load() + c.count.evictions.Load(); n > 0 {
				t.Errorf("%d things went wrong", n)
			}
		}
	})
}

// TestPutIsKept stores through the cache: reads of the stored object do not ask the store.
func TestPutIsKept(t *testing.T) {
	t.Parallel()
	behind := &counted{Blobs: files(t)}
	c := open(t, t.TempDir(), 1<<30, behind)
	fillStore(t, c)
	for i := range objects {
		key, data := object(i)
		if got, ok := c.Cached(key, 5, 4000); !ok || !bytes.Equal(got, data[5:4005]) {
			t.Errorf("%s: %d bytes, %t", key, len(got), ok)
		}
	}
	if n := behind.gets.Load(); n > 0 {
		t.Errorf("%d requests", n)
	}
	if _, ok := c.Cached("v1/p/c/other", 0, 1); ok {
		t.Error("what is not there is there")
	}
}

// TestFlights asks for one range many times at once; the first request fails.
func TestFlights(t *testing.T) {
	t.Parallel()
	behind := &counted{Blobs: files(t), came: make(chan struct{}, 100)}
	fillStore(t, behind)
	behind.hold = make(chan struct{})
	c := open(t, t.TempDir(), 1<<30, behind)
	key, data := object(1)
	first, give := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() {
		if _, err := blobtest.Get(first, c, key, 10, 10_000); !errors.Is(err, context.Canceled) {
			t.Errorf("the first: %v", err)
		}
	})
	<-behind.came
	for range 16 {
		all.Go(func() {
			got, err := blobtest.Get(t.Context(), c, key, 10, 10_000)
			if err != nil || !bytes.Equal(got, data[10:10_010]) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		})
	}
	give()
	<-behind.came
	close(behind.hold)
	all.Wait()
	if n := behind.gets.Load(); n != 2 {
		t.Errorf("%d requests, want one and one again", n)
	}
}

// taken returns what the files of a directory take.
func taken(t *testing.T, path string) (total int64, names []string) {
	t.Helper()
	entries, err := os.ReadDir(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok && e.Name() != lockFile {
			total += st.Blocks * 512
			names = append(names, e.Name())
		}
	}
	return total, names
}

// TestBudget reads more than the budget, with two caches at once.
func TestBudget(t *testing.T) {
	t.Parallel()
	eachFileSystem(t, func(t *testing.T, path string) {
		t.Helper()
		const budget, workers, most = 4 << 20, 4, 256 << 10
		behind := files(t)
		fillStore(t, behind)
		caches := []*Cache{open(t, path, budget, behind), open(t, path, budget, behind)}
		var g errgroup.Group
		for w := range workers {
			g.Go(func() error {
				random := rand.New(rand.NewPCG(9, uint64(w)))
				for range 40 {
					key, data := object(random.IntN(objects))
					off := random.Int64N(objectSize - most)
					got, err := blobtest.Get(t.Context(), caches[w%2], key, off, most)
					if err != nil || !bytes.Equal(got, data[off:off+most]) {
						return fmt.Errorf("%s: %d bytes, %w", key, len(got), err)
					}
					if n, _ := taken(t, path); n > budget+workers*(most+8192) {
						return fmt.Errorf("%d bytes are taken of %d", n, budget)
					}
				}
				return nil
			})
		}
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}
		if caches[0].count.evictions.Load()+caches[1].count.evictions.Load() == 0 {
			t.Error("nothing was evicted")
		}
		smaller := open(t, path, 1<<20, behind) // as after a restart with another budget
		if n, _ := taken(t, path); n > 1<<20 || smaller.Used() != n {
			t.Errorf("%d bytes are taken, %d are accounted", n, smaller.Used())
		}
	})
}

// TestEvictsOldest: the most recently used files stay.
func TestEvictsOldest(t *testing.T) {
	t.Parallel()
	path, behind := t.TempDir(), files(t)
	fillStore(t, behind)
	c := open(t, path, 3*objectSize, behind)
	use := func(i int) {
		t.Helper()
		key, data := object(i)
		got, err := blobtest.Get(t.Context(), c, key, 0, objectSize)
		if err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%s: %d bytes, %v", key, len(got), err)
		}
	}
	for i := range 2 {
		use(i)
		key, _ := object(i)
		old := time.Now().Add(time.Duration(i-10) * time.Hour)
		if err := os.Chtimes(filepath.Join(path, name(key)), old, old); err != nil {
			t.Fatal(err)
		}
	}
	use(0) // used again: now it is the younger one
	use(2)
	for i, want := range []bool{true, false, true} {
		key, _ := object(i)
		if _, ok := c.Cached(key, 0, objectSize); ok != want {
			t.Errorf("%s is there: %t", key, ok)
		}
	}
}

// TestFullDisk uses a cache whose file system is smaller than its budget, and one that leaves room to others.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	require.Root(t)
	behind := files(t)
	fillStore(t, behind)
	for name, spare := range map[string]int64{"full": -1 << 40, "spare": 2 << 20} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := t.TempDir()
			if err := unix.Mount("cache", path, "tmpfs", 0, "size=5m"); err != nil {
				t.Fatal(err)
			}
			c, err := Open(Config{Dir: path, Budget: 1 << 30, Spare: spare, Behind: behind, Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := errors.Join(c.Close(), unix.Unmount(path, 0)); err != nil {
					t.Error(err)
				}
			})
			for range 3 {
				for i := range objects {
					key, data := object(i)
					got, err := blobtest.Get(t.Context(), c, key, 0, objectSize)
					if err != nil || !bytes.Equal(got, data) {
						t.Fatalf("%s: %d bytes, %v", key, len(got), err)
					}
				}
			}
			n, _ := taken(t, path)
			if spare > 0 && n > 3<<20 {
				t.Errorf("%d bytes are taken of 5 MiB", n)
			}
			if full := c.count.failures.Load() > 0; full != (spare < 0) {
				t.Errorf("the disk was full: %t", full)
			}
		})
	}
}

// TestBroken removes what the cache needs, or holds its lock like a stopped process: reads still succeed.
func TestBroken(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(t *testing.T, path string){
		"directory": func(t *testing.T, path string) {
			t.Helper()
			if err := os.RemoveAll(path); err != nil {
				t.Error(err)
			}
		},
		"directories for files": func(t *testing.T, path string) {
			t.Helper()
			for i := range objects {
				key, _ := object(i)
				if err := errors.Join(os.RemoveAll(filepath.Join(path, name(key))), os.MkdirAll(filepath.Join(path, name(key), "x"), 0o700)); err != nil {
					t.Error(err)
				}
			}
		},
		"empty files": func(t *testing.T, path string) {
			t.Helper()
			for i := range objects {
				key, _ := object(i)
				if err := os.WriteFile(filepath.Join(path, name(key)), nil, 0o600); err != nil {
					t.Error(err)
				}
			}
		},
		"account": func(t *testing.T, path string) {
			t.Helper()
			if err := os.WriteFile(filepath.Join(path, lockFile), []byte{1, 2, 3, 4, 5, 6, 7, 255}, 0o600); err != nil {
				t.Error(err)
			}
		},
		"lock": func(t *testing.T, path string) {
			t.Helper()
			f, err := os.Open(filepath.Join(path, lockFile))
			if err == nil {
				err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
			}
			if err != nil {
				t.Error(err)
			}
			t.Cleanup(func() { _ = f.Close() })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path, behind := filepath.Join(t.TempDir(), "cache"), files(t)
			fillStore(t, behind)
			c := open(t, path, 1<<30, behind)
			for round := range 3 {
				for i := range objects {
					key, data := object(i)
					got, err := blobtest.Get(t.Context(), c, key, 100, 10_000)
					if err != nil || !bytes.Equal(got, data[100:10_100]) {
						t.Fatalf("%s: %d bytes, %v", key, len(got), err)
					}
				}
				if round == 0 {
					spoil(t, path)
				}
			}
		})
	}
}

// readForEver reads at random, and reports each read.
func readForEver(path string) {
	die := func(err error) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	s, err := dir.Open(filepath.Join(path, "store"))
	if err != nil {
		die(err)
	}
	c, err := Open(Config{Dir: filepath.Join(path, "cache"), Budget: 8 << 20, Behind: s, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		die(err)
	}
	for {
		key, data := object(rand.IntN(objects))
		off, n := rand.Int64N(objectSize), rand.Int64N(500_000)
		got, err := blobtest.Get(context.Background(), c, key, off, n)
		if err != nil || !bytes.Equal(got, data[off:min(off+n, objectSize)]) {
			die(fmt.Errorf("%d bytes from %d on of %s: %d, %w", n, off, key, len(got), err))
		}
		fmt.Println("read")
	}
}

// TestKilled kills processes in the middle of reads through one cache: what remains is right and within the budget.
func TestKilled(t *testing.T) {
	t.Parallel()
	path := t.TempDir()
	s, err := dir.Open(filepath.Join(path, "store"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	fillStore(t, s)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for round := range 4 {
		var both sync.WaitGroup
		for i := range 2 {
			both.Go(func() {
				cmd := exec.CommandContext(t.Context(), self)
				cmd.Env = append(os.Environ(), readerEnv+"="+path)
				var complaint bytes.Buffer
				cmd.Stderr = &complaint
				out, err := cmd.StdoutPipe()
				if err == nil {
					err = cmd.Start()
				}
				if err != nil {
					t.Error(err)
					return
				}
				_, err = io.CopyN(io.Discard, out, int64(len("read\n")*(3+7*round+i)))
				err = errors.Join(err, cmd.Process.Kill())
				_ = cmd.Wait() // it was killed
				if err != nil || complaint.Len() > 0 {
					t.Errorf("%v: %s", err, complaint.String())
				}
			})
		}
		both.Wait()
	}
	c := open(t, filepath.Join(path, "cache"), 8<<20, s)
	if n, _ := taken(t, c.cfg.Dir); n > 8<<20 {
		t.Errorf("%d bytes are taken", n)
	}
	there := 0
	for i := range objects {
		key, data := object(i)
		for off := int64(0); off < objectSize; off += c.block {
			got, ok := c.Cached(key, off, c.block)
			if ok && !bytes.Equal(got, data[off:min(off+c.block, objectSize)]) {
				t.Fatalf("%s has other bytes at %d", key, off)
			}
			if ok {
				there++
			}
		}
	}
	if there == 0 {
		t.Error("nothing is there")
	}
}
