package daemon

import (
	"context"
	"strings"

	"golang.org/x/time/rate"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
)

// StoreConfig says where checkpoints are made durable. Controllers and runners of a cluster have the same.
type StoreConfig struct {
	URL string // dir:/path; empty: nowhere
	// Bandwidth is how many bytes a second a runner sends at most; 0: as many as it can.
	Bandwidth int64
}

// Open returns the store; nil where there is none.
func (c StoreConfig) Open(_ context.Context) (blob.Blobs, error) {
	if c.URL == "" {
		return nil, nil //nolint:nilnil // there is none, which is no error
	}
	if path, ok := strings.CutPrefix(c.URL, "dir:"); ok && strings.HasPrefix(path, "/") {
		return dir.Open(path)
	}
	return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "--store: %q is not a store; give dir:/path", core.Clip(c.URL))
}

// throttle bounds what is sent; nil for no bound.
func (c StoreConfig) throttle() func(context.Context, int) error {
	if c.Bandwidth == 0 {
		return nil
	}
	// What is read at once is at most this much, and costs its time.
	const burst = 1 << 20
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
