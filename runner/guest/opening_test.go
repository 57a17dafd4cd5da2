package guest

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/test/eventually"
)

// openings counts the requests that have begun to open a stream, and those that are about to.
type openings struct{ begun, now atomic.Int64 }

// of has the transport's dials counted.
func (o *openings) of(t *http.Transport) {
	dial := t.DialContext
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		o.now.Add(1)
		o.begun.Add(1)
		defer o.now.Add(-1)
		return dial(ctx, network, addr)
	}
}

// TestStreamsThatAreNotAccepted: an agent that accepts no stream is sent 64. Further requests wait, and at most 64 of them are left when
// their callers have gone.
func TestStreamsThatAreNotAccepted(t *testing.T) {
	const requests = 20 * maxOpening
	for name, ask := range map[string]func(ctx context.Context, c *Client) error{
		"control": func(ctx context.Context, c *Client) error {
			return c.call(ctx, time.Hour, http.MethodGet, guestapi.PathHealth, nil, &guestapi.Health{}) // as Health, and nothing expires
		},
		"public": func(ctx context.Context, c *Client) error {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://guest"+guestapi.PathProcesses, nil)
			if err != nil {
				return err
			}
			res, err := c.Transport().RoundTrip(req)
			if err == nil {
				_ = res.Body.Close()
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := serveRaw(t, func(link *guestapi.Link) { _, _ = io.Copy(io.Discard, link) })
			var open openings
			open.of(c.control)
			open.of(c.public)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var wg sync.WaitGroup
			for range requests {
				wg.Go(func() {
					if err := ask(ctx, c); !errors.Is(err, context.Canceled) {
						t.Error(err)
					}
				})
			}
			eventually.True(t, "the others wait", func() bool { return open.begun.Load() == requests && open.now.Load() == requests-maxOpening })
			if n := c.mux.NumStreams(); n != maxOpening {
				t.Errorf("%d streams are open, want %d", n, maxOpening)
			}
			cancel()
			wg.Wait()
			eventually.True(t, "nothing is left of those whose callers have gone", func() bool { return open.now.Load() <= maxOpening })
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			eventually.True(t, "nothing waits for a connection that has ended", func() bool { return open.now.Load() == 0 })
		})
	}
}
