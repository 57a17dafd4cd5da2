package guest

import (
	"context"
	"errors"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/eventually"
)

// opening is how many goroutines of this process are about to open a stream.
func opening() int {
	b := make([]byte, 16<<20)
	return strings.Count(string(b[:runtime.Stack(b, true)]), "guest.(*Client).open(")
}

// TestStreamsThatAreNotAccepted: an agent that accepts no stream is sent 64. Further requests wait, and at most 64 of them are left when
// their callers have gone.
func TestStreamsThatAreNotAccepted(t *testing.T) {
	const requests = 20 * maxOpening
	for name, ask := range map[string]func(ctx context.Context, c *Client) error{
		"control": func(ctx context.Context, c *Client) error {
			_, err := c.Health(ctx)
			return err
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
			eventually.True(t, "the others wait", func() bool { return opening() == requests-maxOpening })
			if n := c.mux.NumStreams(); n != maxOpening {
				t.Errorf("%d streams are open, want %d", n, maxOpening)
			}
			cancel()
			wg.Wait()
			eventually.True(t, "nothing is left of those whose callers have gone", func() bool { return opening() <= maxOpening })
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			eventually.True(t, "nothing waits for a connection that has ended", func() bool { return opening() == 0 })
		})
	}
}
