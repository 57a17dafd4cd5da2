package testpool

import (
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Relay carries TCP connections to an address and counts what they carry.
type Relay struct {
	listener net.Listener
	to       string
	sent     atomic.Int64
	received atomic.Int64
	wg       sync.WaitGroup

	mu     sync.Mutex // guards what follows
	closed bool
	conns  map[net.Conn]bool
	held   chan struct{} // closed by Resume; nil while everything passes
	pace   int64         // bytes a second, of all connections and both ways; 0: as fast as it goes
	next   time.Time     // when the next bytes may pass at that pace
}

// NewRelay listens at an address, whose port may be 0, for connections to another. Close ends it.
func NewRelay(ctx context.Context, listen, to string) (*Relay, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", listen)
	if err != nil {
		return nil, err
	}
	r := &Relay{listener: l, to: to, conns: make(map[net.Conn]bool)}
	r.wg.Go(r.accept)
	return r, nil
}

// Address is where it listens, host:port.
func (r *Relay) Address() string { return r.listener.Addr().String() }

// Sent is how many bytes were carried to the address so far, those of the protocol included.
func (r *Relay) Sent() int64 { return r.sent.Load() }

// Received is how many came back.
func (r *Relay) Received() int64 { return r.received.Load() }

// Hold has nothing pass any more: the address takes connections and is silent. What is said meanwhile is carried after Resume.
func (r *Relay) Hold() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held == nil && !r.closed {
		r.held = make(chan struct{})
	}
}

// Resume ends Hold.
func (r *Relay) Resume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.release()
}

// Pace has so many bytes pass in a second at most, all connections and both ways taken together; 0: as many as come.
func (r *Relay) Pace(bytesPerSecond int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pace = bytesPerSecond
}

// release lets everything pass. The caller holds mu.
func (r *Relay) release() {
	if r.held != nil {
		close(r.held)
		r.held = nil
	}
}

// pass waits until n bytes may pass.
func (r *Relay) pass(n int) {
	r.mu.Lock()
	var wait time.Duration
	if r.pace > 0 && !r.closed {
		if now := time.Now(); r.next.Before(now) {
			r.next = now
		}
		wait = time.Until(r.next)
		r.next = r.next.Add(time.Duration(n) * time.Second / time.Duration(r.pace))
	}
	r.mu.Unlock()
	if wait > 0 {
		<-time.After(wait)
	}
	r.mu.Lock()
	held := r.held
	r.mu.Unlock()
	if held != nil {
		<-held
	}
}

// Close ends all connections and returns when nothing is carried any more.
func (r *Relay) Close() error {
	err := r.listener.Close()
	r.mu.Lock()
	r.closed = true
	for c := range r.conns {
		_ = c.Close() // its reader learns of it
	}
	r.release()
	r.mu.Unlock()
	r.wg.Wait()
	return err
}

// keep remembers a connection, so that Close ends it; false when it is too late for that.
func (r *Relay) keep(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.conns[c] = true
	}
	return !r.closed
}

func (r *Relay) drop(c net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, c)
	_ = c.Close() // a second time, perhaps
}

func (r *Relay) accept() {
	for {
		near, err := r.listener.Accept()
		if err != nil {
			return
		}
		r.wg.Go(func() { r.carry(near) })
	}
}

func (r *Relay) carry(near net.Conn) {
	defer r.drop(near)
	if !r.keep(near) {
		return
	}
	far, err := (&net.Dialer{}).Dial("tcp", r.to)
	if err != nil {
		return
	}
	defer r.drop(far)
	if !r.keep(far) {
		return
	}
	var both sync.WaitGroup
	both.Go(func() { r.pump(far, near, &r.sent) })
	both.Go(func() { r.pump(near, far, &r.received) })
	both.Wait()
}

// pump carries one direction to its end, which is the end of both.
func (r *Relay) pump(to, from net.Conn, count *atomic.Int64) {
	defer to.Close()
	defer from.Close()
	_, _ = io.Copy(&counted{r, to, count}, from) // how it ends is the ends' affair
}

type counted struct {
	relay *Relay
	w     io.Writer
	count *atomic.Int64
}

// Write implements io.Writer.
func (c *counted) Write(p []byte) (int, error) {
	c.relay.pass(len(p))
	n, err := c.w.Write(p)
	c.count.Add(int64(n))
	return n, err
}
