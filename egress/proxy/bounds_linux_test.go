package proxy_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/coppice-dev/coppice/egress/proxy"
	"github.com/coppice-dev/coppice/internal/test/eventually"
)

// TestManyStreams: a sandbox has at most its number of flows under way, over any number of connections. When they end,
// new flows are possible.
func TestManyStreams(t *testing.T) {
	const most, conns, each = 48, 4, 40
	b := newBankIn(newWorldWith(t, func(c *proxy.Config) { c.MaxFlows = most }, bankHost))
	var under, worst atomic.Int64
	release := make(chan struct{})
	b.open(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/first" {
			return
		}
		if n := under.Add(1); n > worst.Load() {
			worst.Store(n)
		}
		defer under.Add(-1)
		select {
		case <-release:
		case <-r.Context().Done():
		}
		fmt.Fprint(w, "done")
	})
	var wg sync.WaitGroup
	var served, refused atomic.Int64
	var guests []*http.Client
	for range conns {
		c := b.guest(true, true)
		if status, all := b.ask(c, "GET", "https://"+bankHost+"/first", ""); status != http.StatusOK {
			t.Fatal(status, all)
		}
		guests = append(guests, c)
	}
	for _, c := range guests {
		for range each {
			wg.Go(func() {
				switch status, all := b.ask(c, "GET", "https://"+bankHost+"/", "", b.bearer()...); {
				case status == http.StatusOK:
					served.Add(1)
				case status == http.StatusTooManyRequests && strings.Contains(all, "flows under way"):
					refused.Add(1)
				default:
					t.Errorf("%d %s", status, all)
				}
			})
		}
	}
	eventually.True(t, "those beyond are refused", func() bool { return refused.Load() == conns*each-most })
	if _, flows := b.server.Held(b.id); flows != most {
		t.Errorf("%d flows are under way, want %d", flows, most)
	}
	close(release)
	wg.Wait()
	if served.Load() != most || worst.Load() > most {
		t.Errorf("%d were served, %d at once; want %d", served.Load(), worst.Load(), most)
	}
	b.flows()
	if status, all := b.ask(b.guest(true, true), "GET", "https://"+bankHost+"/", "", b.bearer()...); status != http.StatusOK {
		t.Errorf("afterwards: %d %s", status, all)
	}
}

// TestSlowReaders: data for guests that do not read stays at the hosts, except for a bounded part.
func TestSlowReaders(t *testing.T) {
	const streams, offered, perStream = 24, 16 << 20, 1 << 20 // perStream: room of the windows and the kernel's buffers
	b := newBank(t)
	var sent, stopped atomic.Int64
	b.open(func(w http.ResponseWriter, r *http.Request) {
		defer stopped.Add(1)
		for i := 0; i < offered; i += 32 << 10 {
			n, err := w.Write(make([]byte, 32<<10))
			if sent.Add(int64(n)); err != nil {
				return
			}
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := b.guest(true, true)
	c.Timeout = 0
	c.Transport.(*http.Transport).HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: 64 << 10} // the guest's own window
	for range streams {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+bankHost+"/", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+b.g.Placeholder)
		resp, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
	}
	// The flow of data has stopped when nothing was added for a while. Anything added later is within the same bound.
	last, same := int64(-1), 0
	eventually.True(t, "the hosts wait", func() bool {
		if n := sent.Load(); n != last {
			last, same = n, 0
		} else {
			same++
		}
		return same > 100
	})
	if n := sent.Load(); n > streams*perStream+(8<<20) || stopped.Load() != 0 {
		t.Errorf("%d streams that nobody reads took %d bytes, and %d are over", streams, n, stopped.Load())
	}
	cancel()
	eventually.True(t, "the hosts hear of the end", func() bool { return stopped.Load() == streams })
	b.flows()
}

// TestSlowBodies: a slow body is sent on as it arrives, an endless body is not buffered, and a head of more than 64 KiB
// is refused.
func TestSlowBodies(t *testing.T) {
	const much = 64 << 20
	b := newBank(t)
	var got atomic.Int64
	hold := make(chan struct{}, 1)
	b.open(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hold" { // this handler does not read
			select {
			case <-hold:
			case <-r.Context().Done():
			}
			return
		}
		p := make([]byte, 32<<10)
		for {
			n, err := r.Body.Read(p)
			if got.Add(int64(n)); err != nil {
				break
			}
		}
	})
	for _, two := range []bool{false, true} {
		c := b.guest(true, two)
		c.Timeout = 0
		got.Store(0)
		reader, writer := io.Pipe()
		answered := make(chan int)
		send := func(path string, body io.Reader) {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+bankHost+path, body)
			if err != nil {
				t.Error(err)
			}
			resp, err := c.Do(r)
			if err != nil {
				answered <- 0
				return
			}
			_ = resp.Body.Close()
			answered <- resp.StatusCode
		}
		go send("/", reader)
		for i := range 20 { // each byte arrives before the next is there
			if _, err := writer.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			eventually.True(t, "a byte arrives", func() bool { return got.Load() == int64(i+1) })
		}
		_ = writer.Close()
		if status := <-answered; status != http.StatusOK {
			t.Errorf("HTTP/2 %v: %d", two, status)
		}
		endless := &endless{left: much}
		go send("/hold", endless)
		last, same := int64(-1), 0
		eventually.True(t, "the guest waits", func() bool {
			if n := endless.read.Load(); n != last {
				last, same = n, 0
			} else {
				same++
			}
			return last > 0 && same > 100
		})
		if n := endless.read.Load(); n > much/2 {
			t.Errorf("HTTP/2 %v: %d bytes were taken for a host that reads none", two, n)
		}
		hold <- struct{}{}
		<-answered
		status, all := b.ask(c, "GET", "https://"+bankHost+"/", "", "X-Long", strings.Repeat("x", 100<<10))
		if status == http.StatusOK {
			t.Errorf("HTTP/2 %v: a head of 100 KiB: %d %s", two, status, all)
		}
	}
	b.flows()
}

// endless is a body of zeros.
type endless struct {
	read atomic.Int64
	left int64
}

func (e *endless) Read(p []byte) (int, error) {
	n := min(int64(len(p)), e.left-e.read.Load())
	if n <= 0 {
		return 0, io.EOF
	}
	clear(p[:n])
	e.read.Add(n)
	return int(n), nil
}
