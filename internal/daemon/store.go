package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/undo"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/bloburl"
	"github.com/coppice-dev/coppice/snapshotstore/blob/cache"
	"github.com/coppice-dev/coppice/snapshotstore/blob/peers"
	"github.com/coppice-dev/coppice/snapshotstore/blob/s3"
)

// StoreConfig says where checkpoints are made durable. Controllers and runners of a cluster have the same store.
type StoreConfig struct {
	URL string // see bloburl; empty: nowhere
	// AccessKeyFile and SecretKeyFile hold the credentials, and are read again when the store refuses those that it was shown.
	AccessKeyFile, SecretKeyFile string
	AccessKey, SecretKey         string `json:"-"` // instead of files
	// Bandwidth is how many bytes a second a runner sends at most; 0: as many as it can.
	Bandwidth int64
	// CacheDir is where a runner keeps bytes of the store's objects, which several processes of the host may share; CacheSize is how many,
	// 0 for none.
	CacheDir  string
	CacheSize int64
	// Whole has runners fetch checkpoints whole before they fork them, instead of letting memory come while machines run.
	Whole bool
	// CopiesSize is how many bytes of a runner's disk checkpoints may take that were fetched and not captured there; 0: half of it.
	CopiesSize int64
	// Floor is how many bytes of a runner's disk stay free of what it fetches; 0: a sixteenth of the disk, at most 4 GiB.
	Floor int64
	// Peers asks other runners for objects before the store is asked; nil: nobody is.
	Peers peers.Asker `json:"-"`
	// Member is the file of the runner's membership, by which its pager asks them; empty: it does not.
	Member string
}

// server is the name of the host that a store was said to be at; empty where none was named, as for that of a cloud.
func (c StoreConfig) server() string {
	u, err := url.Parse(c.URL)
	if err != nil {
		return "" // Open says so
	}
	at, err := url.Parse(u.Query().Get("endpoint"))
	if err != nil {
		return ""
	}
	return at.Hostname()
}

// copies is CopiesSize, of the disk that a directory is on.
func (c StoreConfig) copies(dir string) int64 {
	if c.CopiesSize > 0 {
		return c.CopiesSize
	}
	return diskSize(dir) / 2
}

// Chain returns the store as the processes of a runner's host see it: behind other runners, and those behind the host's cache. Without any
// it is what Open returns.
func (c StoreConfig) Chain(ctx context.Context, log *slog.Logger, metrics prometheus.Registerer, steps *undo.Stack) (blob.Blobs, error) {
	store, err := c.Open(ctx, log, steps)
	if err != nil || store == nil {
		return store, err
	}
	if c.Peers != nil {
		if store, err = peers.New(store, c.Peers, log.With("component", "peers"), metrics); err != nil {
			return nil, err
		}
	}
	if c.CacheSize == 0 {
		return store, nil
	}
	kept, err := cache.Open(cache.Config{Dir: c.CacheDir, Budget: c.CacheSize, Spare: spare(filepath.Dir(c.CacheDir)), Behind: store, Log: log.With("component", "cache"), Metrics: metrics})
	if err != nil {
		log.WarnContext(ctx, "there is no cache of the store; everything is read from it", "err", err)
		return store, nil
	}
	steps.Push("cache of the store", func(context.Context) error { return kept.Close() })
	return kept, nil
}

// spare is what the cache leaves free of a file system: an eighth of it, or 8 GiB.
func spare(path string) int64 { return min(8<<30, diskSize(path)/8) }

// diskSize is 0 where it is not known.
func diskSize(path string) int64 {
	var fs unix.Statfs_t
	if unix.Statfs(path, &fs) != nil {
		return 0
	}
	return int64(fs.Blocks) * fs.Bsize //nolint:gosec // G115: sizes of disks are below 2^63
}

// Open returns the store, or nil if none is configured, and adds its close to steps. It is no error if the store cannot
// be reached now, or does not answer. Any other fault is an error, or is logged if it is found late.
func (c StoreConfig) Open(ctx context.Context, log *slog.Logger, steps *undo.Stack) (blob.Blobs, error) {
	if c.URL == "" {
		return nil, nil //nolint:nilnil // there is none, which is no error
	}
	credentials, err := c.credentials(ctx)
	if err != nil {
		return nil, err
	}
	store, err := bloburl.Dial(c.URL, credentials)
	if err != nil {
		return nil, err
	}
	probing, stop := context.WithCancel(ctx)
	result, late, done := make(chan error), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		err := blob.Probe(probing, store)
		select {
		case result <- err:
		case <-late:
			logProbe(probing, log, err)
		}
	}()
	steps.Push("store of checkpoints", func(context.Context) error {
		stop()
		<-done
		return store.Close()
	})
	patience := time.NewTimer(storeProbeTime)
	defer patience.Stop()
	select {
	case err = <-result:
	case <-patience.C:
		close(late)
		log.WarnContext(ctx, "the store of checkpoints does not answer yet; nothing is sealed until it does", "waited_ms", core.Milliseconds(storeProbeTime))
		return store, nil
	}
	if core.CodeOf(err) == core.CodeStoreUnavailable {
		logProbe(ctx, log, err)
		return store, nil
	}
	return store, err
}

// storeProbeTime is how long a start waits for the store to show that it can be used: a silent one holds nothing else up.
const storeProbeTime = 2 * time.Second

// logProbe tells how a store was found that nothing has waited for.
func logProbe(ctx context.Context, log *slog.Logger, err error) {
	switch {
	case ctx.Err() != nil: // it is not used any more
	case err == nil:
		log.InfoContext(ctx, "the store of checkpoints answers")
	case core.CodeOf(err) == core.CodeStoreUnavailable:
		log.WarnContext(ctx, "the store of checkpoints cannot be reached; nothing is sealed until it is back", "err", err)
	default:
		log.ErrorContext(ctx, "the store of checkpoints cannot be used; nothing is sealed until it can", "err", err)
	}
}

func (c StoreConfig) credentials(ctx context.Context) (s3.Credentials, error) {
	if c.AccessKeyFile == "" && c.SecretKeyFile == "" {
		return s3.Credentials{AccessKey: c.AccessKey, SecretKey: c.SecretKey}, nil
	}
	if c.AccessKeyFile == "" || c.SecretKeyFile == "" {
		return s3.Credentials{}, core.Errorf(core.Invalid, core.CodeInvalidField, "--store-access-key-file and --store-secret-key-file go together")
	}
	return c.fromFiles(ctx)
}

// fromFiles reads the credentials. A renewal reads the files again.
func (c StoreConfig) fromFiles(context.Context) (s3.Credentials, error) {
	access, errA := os.ReadFile(c.AccessKeyFile)
	secret, errS := os.ReadFile(c.SecretKeyFile)
	if err := errors.Join(errA, errS); err != nil {
		return s3.Credentials{}, core.Wrapf(err, core.FailedPrecondition, core.CodeStoreAuth, "the store's credentials cannot be read from %s and %s", c.AccessKeyFile, c.SecretKeyFile)
	}
	return s3.Credentials{AccessKey: strings.TrimSpace(string(access)), SecretKey: strings.TrimSpace(string(secret)), Renew: c.fromFiles}, nil
}

// throttle bounds what is sent; nil for no bound.
func (c StoreConfig) throttle() func(context.Context, int) error {
	if c.Bandwidth == 0 {
		return nil
	}
	const burst = 1 << 20 // what may be sent at once
	limiter := rate.NewLimiter(rate.Limit(c.Bandwidth), burst)
	return func(ctx context.Context, n int) error {
		for ; n > 0; n -= burst {
			if err := limiter.WaitN(ctx, min(n, burst)); err != nil {
				return err
			}
		}
		return nil
	}
}
