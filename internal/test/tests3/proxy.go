package tests3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/testaddr"
)

// Kind is the effect of a fault on a request or its answer. N below is the fault's N.
type Kind int

// The kinds.
const (
	// Answer returns the fault's Status and Code without asking the server.
	Answer Kind = iota
	// Reset resets the connection after N bytes of the answer's body.
	Reset
	// Cut closes the connection after N bytes of the answer's body, all of which arrive.
	Cut
	// Stall sends nothing more after N bytes of the answer's body; if N is 0, the head of the answer is not sent
	// either.
	Stall
	// Slow sends one byte of the answer's body per Every.
	Slow
	// Flip changes the lowest bit of byte N of the answer's body.
	Flip
	// Truncate leaves N bytes of the answer's body, and the answer's length agrees with that.
	Truncate
	// Whole answers a request for a range like a request for the whole object, as servers do that ignore ranges, with N
	// bytes of it.
	Whole
	// Drop lets the server execute the request, and resets the connection instead of answering.
	Drop
	// ResetRequest resets both connections after N bytes of the request's body.
	ResetRequest
	// StallRequest reads nothing more after N bytes of the request's body, and passes nothing on.
	StallRequest
	// SlowRequest reads N bytes of the request's body per Every.
	SlowRequest
	// FlipRequest changes the lowest bit of byte N of the request's body.
	FlipRequest
)

// Fault says what happens to which requests.
type Fault struct {
	Kind Kind
	N    int64
	// Of selects the requests; nil: all.
	Of func(*http.Request) bool
	// Skip is how many of these requests pass first, Times how many are hit then; 0: all.
	Skip, Times int
	Status      int
	Code        string
	Every       time.Duration
}

// The kinds of S3 requests of a backend.

// Puts are uploads of objects in one request.
func Puts(r *http.Request) bool { return r.Method == http.MethodPut && !r.URL.Query().Has("uploadId") }

// Parts are uploads of parts of objects.
func Parts(r *http.Request) bool { return r.Method == http.MethodPut && r.URL.Query().Has("uploadId") }

// Begins begin multipart uploads.
func Begins(r *http.Request) bool { return r.Method == http.MethodPost && r.URL.Query().Has("uploads") }

// Completes complete multipart uploads.
func Completes(r *http.Request) bool {
	return r.Method == http.MethodPost && r.URL.Query().Has("uploadId")
}

// Gets are reads of objects.
func Gets(r *http.Request) bool {
	return r.Method == http.MethodGet && strings.Count(strings.Trim(r.URL.Path, "/"), "/") > 0
}

// Heads are HEAD requests for objects.
func Heads(r *http.Request) bool { return r.Method == http.MethodHead }

// Proxy is a proxy in front of a server that causes faults.
type Proxy struct {
	Address string

	target    string
	transport *http.Transport
	stopped   chan struct{} // ends stalled requests

	mu     sync.Mutex
	faults []*Fault
	seen   []*http.Request // without bodies
	server *http.Server    // nil while it is down
	served chan struct{}
}

// Proxy starts a proxy to the server. It ends with the test.
func (s *Server) Proxy(tb testing.TB) *Proxy {
	tb.Helper()
	p := &Proxy{
		target: s.Address, stopped: make(chan struct{}), transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 16},
	}
	l, err := (&net.ListenConfig{}).Listen(context.WithoutCancel(tb.Context()), "tcp", testaddr.New())
	if err != nil {
		tb.Fatal(err)
	}
	p.Address = l.Addr().String()
	p.listen(l)
	tb.Cleanup(func() {
		close(p.stopped)
		p.Down(tb)
		p.transport.CloseIdleConnections()
	})
	return p
}

// URL is the URL of a store in a bucket behind the proxy.
func (p *Proxy) URL(bucket string) string { return (&Server{Address: p.Address}).URL(bucket) }

// Up lets connections in again after Down.
func (p *Proxy) Up(tb testing.TB) {
	tb.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.server != nil {
		return
	}
	l, err := (&net.ListenConfig{}).Listen(context.WithoutCancel(tb.Context()), "tcp", p.Address)
	if err != nil {
		tb.Fatal(err)
	}
	p.listen(l)
}

// listen accepts connections. The caller holds mu, or nobody else knows the proxy.
func (p *Proxy) listen(l net.Listener) {
	server := &http.Server{Handler: http.HandlerFunc(p.serve), ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: time.Minute}
	served := make(chan struct{})
	p.server, p.served = server, served
	go func() {
		defer close(served)
		_ = server.Serve(l) // until Close
	}()
}

// Down refuses new connections and ends the present ones.
func (p *Proxy) Down(tb testing.TB) {
	tb.Helper()
	p.mu.Lock()
	server, served := p.server, p.served
	p.server = nil
	p.mu.Unlock()
	if server == nil {
		return
	}
	if err := server.Close(); err != nil {
		tb.Error(err)
	}
	<-served
}

// Add adds faults. The first fault that selects a request hits it.
func (p *Proxy) Add(faults ...Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range faults {
		p.faults = append(p.faults, &f)
	}
}

// Clear removes all faults.
func (p *Proxy) Clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = nil
}

// Seen returns the requests of a kind so far, without their bodies; nil: all.
func (p *Proxy) Seen(of func(*http.Request) bool) []*http.Request {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(p.seen), func(r *http.Request) bool { return of != nil && !of(r) })
}

// pick records a request and returns the fault that hits it, or nil.
func (p *Proxy) pick(r *http.Request) *Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen = append(p.seen, &http.Request{Method: r.Method, URL: r.URL, Header: r.Header.Clone()})
	for i, f := range p.faults {
		if f.Of != nil && !f.Of(r) {
			continue
		}
		if f.Skip > 0 {
			f.Skip--
			continue
		}
		if f.Times--; f.Times == 0 {
			p.faults = slices.Delete(p.faults, i, i+1)
		}
		return f
	}
	return nil
}

func (p *Proxy) serve(w http.ResponseWriter, r *http.Request) {
	f := p.pick(r)
	if f == nil {
		f = &Fault{Kind: Flip, N: -1} // no fault: a negative N flips nothing
	}
	if f.Kind == Answer {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/xml")
		w.WriteHeader(f.Status)
		_, _ = fmt.Fprintf(w, "<Error><Code>%s</Code><Message>injected</Message></Error>", f.Code)
		return
	}
	resp, err := p.forward(r, f)
	if err != nil {
		if f.Kind == StallRequest {
			p.hang(r)
		}
		reset(w)
		return
	}
	defer resp.Body.Close()
	p.answer(w, r, f, resp)
}

// forward sends a request to the server, changed by a fault.
func (p *Proxy) forward(r *http.Request, f *Fault) (*http.Response, error) {
	out := r.Clone(r.Context()) // keeps the Host header that was signed
	out.RequestURI, out.URL.Scheme, out.URL.Host = "", "http", p.target
	out.Header.Del("Connection")
	switch f.Kind { //nolint:exhaustive // the faults of requests
	case StallRequest:
		_, _ = io.CopyN(io.Discard, r.Body, f.N)
		return nil, errors.New("stalled")
	case ResetRequest:
		out.Body = io.NopCloser(io.MultiReader(io.LimitReader(r.Body, f.N), broken{}))
	case SlowRequest:
		out.Body = io.NopCloser(&slowed{r: r.Body, f: f, until: p.stopped})
	case FlipRequest:
		out.Body = io.NopCloser(&flipped{r: r.Body, at: f.N})
	}
	if r.ContentLength == 0 {
		out.Body = http.NoBody
	}
	return p.transport.RoundTrip(out)
}

// answer passes an answer on, changed by a fault.
func (p *Proxy) answer(w http.ResponseWriter, r *http.Request, f *Fault, resp *http.Response) {
	status := resp.StatusCode
	body := io.Reader(resp.Body)
	maps.Copy(w.Header(), resp.Header)
	limit := int64(-1)
	switch f.Kind { //nolint:exhaustive // the faults of answers
	case Drop:
		_, _ = io.Copy(io.Discard, resp.Body)
		reset(w)
		return
	case Stall, Reset, Cut:
		if limit = f.N; limit == 0 {
			p.end(w, r, f)
			return
		}
	case Flip:
		body = &flipped{r: body, at: f.N}
	case Truncate:
		body = io.LimitReader(body, f.N)
		w.Header().Set("Content-Length", strconv.FormatInt(min(f.N, resp.ContentLength), 10))
	case Whole:
		status = http.StatusOK
		body = io.LimitReader(body, f.N)
		w.Header().Del("Content-Range")
		w.Header().Set("Content-Length", strconv.FormatInt(min(f.N, resp.ContentLength), 10))
	}
	w.WriteHeader(status)
	switch {
	case f.Kind == Slow:
		p.trickle(w, r, body, f.Every)
	case limit >= 0:
		_, _ = io.CopyN(w, body, limit)
		p.end(w, r, f)
	default:
		_, _ = io.Copy(w, body)
	}
}

// end ends an answer in the middle.
func (p *Proxy) end(w http.ResponseWriter, r *http.Request, f *Fault) {
	if f.N > 0 {
		_ = http.NewResponseController(w).Flush()
	}
	switch f.Kind { //nolint:exhaustive // other faults do not end an answer
	case Stall:
		p.hang(r)
	case Cut:
		panic(http.ErrAbortHandler)
	}
	reset(w)
}

// hang waits until the client gives up.
func (p *Proxy) hang(r *http.Request) {
	select {
	case <-r.Context().Done():
	case <-p.stopped:
	}
}

func (p *Proxy) trickle(w http.ResponseWriter, r *http.Request, body io.Reader, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if _, err := io.CopyN(w, body, 1); err != nil {
			return
		}
		_ = http.NewResponseController(w).Flush()
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		case <-p.stopped:
			return
		}
	}
}

// reset ends a connection in such a way that the client notices at once.
func reset(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

// broken is the end of a body that breaks off.
type broken struct{}

// Read implements io.Reader.
func (broken) Read([]byte) (int, error) { return 0, errors.New("injected") }

// slowed is a body that arrives slowly.
type slowed struct {
	r     io.Reader
	f     *Fault
	until <-chan struct{}
}

// Read implements io.Reader.
func (s *slowed) Read(p []byte) (int, error) {
	select {
	case <-s.until:
		return 0, errors.New("the test is over")
	case <-time.After(s.f.Every):
		return s.r.Read(p[:min(int64(len(p)), s.f.N)])
	}
}

// flipped is a body with one changed bit. With a negative place, nothing is changed.
type flipped struct {
	r   io.Reader
	at  int64
	off int64
}

// Read implements io.Reader.
func (f *flipped) Read(p []byte) (int, error) {
	n, err := f.r.Read(p)
	if i := f.at - f.off; i >= 0 && i < int64(n) {
		p[i] ^= 1
	}
	f.off += int64(n)
	return n, err
}
