//go:build linux

package sessions

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	outputLimit  = 1 << 20         // bytes kept of one stream
	outputFloor  = 64 << 10        // bytes kept of one stream when all streams exceed their budget
	chunkSize    = 16 << 10        //
	startGrace   = 5 * time.Second // how long a new session's output waits for its first follower
	stallTimeout = 30 * time.Second
	drainLimit   = 2 << 20 // maximum bytes read after a process has ended, in case another process still writes
)

// outputBudget bounds the memory of all streams of one agent.
type outputBudget struct {
	limit int64
	used  atomic.Int64
}

// output is one stream of a session: its last bytes, and the readers that wait for more.
type output struct {
	budget *outputBudget
	readMu sync.Mutex // held while bytes are taken from the process, so that they are appended in order

	mu        sync.Mutex // guards the fields below
	chunks    [][]byte   // all of chunkSize except the last
	first     int64      // number of the first byte of chunks[0]; always a multiple of chunkSize
	next      int64      // number of the next byte
	closed    bool       // every process with the stream has closed it
	ended     bool       // the session has ended, so followers do not wait for more
	forgotten bool       // nobody can read it any more; bytes are read from the process and dropped
	grace     time.Time  // until this time, output waits for a first follower
	followers map[*follower]struct{}
	wake      chan struct{} // closed at the next change, when somebody waits
}

// follower is a reader that reads continuously. The process waits for it like for the reader of a pipe, as long as it
// makes progress.
type follower struct {
	o     *output
	at    int64
	moved time.Time
}

func newOutput(b *outputBudget, grace time.Time) *output {
	return &output{budget: b, grace: grace, followers: map[*follower]struct{}{}}
}

// changed wakes the waiters. The caller holds mu.
func (o *output) changed() {
	if o.wake != nil {
		close(o.wake)
		o.wake = nil
	}
}

// change returns a channel that the next change closes. The caller holds mu.
func (o *output) change() <-chan struct{} {
	if o.wake == nil {
		o.wake = make(chan struct{})
	}
	return o.wake
}

// pump reads what the process writes until the stream is closed.
func (o *output) pump(f *os.File) {
	defer func() {
		_ = f.Close()
		o.close()
	}()
	rc, err := f.SyscallConn()
	if err != nil {
		return
	}
	for {
		o.waitRoom()
		var n int
		var rerr error
		err := rc.Read(func(fd uintptr) bool {
			n, rerr = o.pull(int(fd))
			return !errors.Is(rerr, unix.EAGAIN)
		})
		if err != nil || rerr != nil && !errors.Is(rerr, unix.EINTR) || rerr == nil && n == 0 {
			return // a terminal without processes gives EIO
		}
	}
}

// drain reads what is in the stream when its process has ended. Other processes may still have it open.
func (o *output) drain(f *os.File) {
	rc, err := f.SyscallConn()
	if err != nil {
		return
	}
	for total := 0; total < drainLimit; {
		o.waitRoom()
		var n int
		var rerr error
		if err := rc.Control(func(fd uintptr) { n, rerr = o.pull(int(fd)) }); err != nil || rerr != nil && !errors.Is(rerr, unix.EINTR) || n == 0 && rerr == nil {
			return
		}
		total += max(n, 0)
	}
}

// pull reads once from a non-blocking descriptor.
func (o *output) pull(fd int) (int, error) {
	o.readMu.Lock()
	defer o.readMu.Unlock()
	o.mu.Lock()
	if len(o.chunks) == 0 || len(o.chunks[len(o.chunks)-1]) == chunkSize {
		o.chunks = append(o.chunks, make([]byte, 0, chunkSize))
		o.budget.used.Add(chunkSize)
	}
	last := o.chunks[len(o.chunks)-1]
	o.mu.Unlock()

	// Nobody else writes after the end of the last chunk, and readers stay before it.
	n, err := unix.Read(fd, last[len(last):chunkSize])
	if n <= 0 {
		return n, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.chunks[len(o.chunks)-1] = last[:len(last)+n]
	o.next += int64(n)
	o.trim()
	o.changed()
	return n, nil
}

// trim drops the oldest chunks over the limit, but none that a follower still has time to read. The caller holds mu.
func (o *output) trim() {
	limit, keep := o.limit(), o.next
	for f := range o.followers {
		if !o.forgotten && time.Since(f.moved) < stallTimeout {
			keep = min(keep, f.at)
		}
	}
	for len(o.chunks) > 1 && o.first+chunkSize <= keep && (o.forgotten || o.next-o.first >= limit+chunkSize) {
		o.chunks[0] = nil
		o.chunks = o.chunks[1:]
		o.first += chunkSize
		o.budget.used.Add(-chunkSize)
	}
}

func (o *output) limit() int64 {
	if o.budget.used.Load() > o.budget.limit {
		return outputFloor
	}
	return outputLimit
}

// waitRoom waits while there is no room because a follower that makes progress has not read the oldest bytes.
func (o *output) waitRoom() {
	for {
		o.mu.Lock()
		until := o.blockedUntil(time.Now())
		if until.IsZero() {
			o.mu.Unlock()
			return
		}
		ch := o.change()
		o.mu.Unlock()
		timer := time.NewTimer(time.Until(until))
		select {
		case <-ch:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// blockedUntil returns until when there is no room if nothing changes; zero when there is room. The caller holds mu.
func (o *output) blockedUntil(now time.Time) time.Time {
	if o.forgotten || o.next-o.first < o.limit() {
		return time.Time{}
	}
	var until time.Time
	for f := range o.followers {
		if o.next-f.at < o.limit() {
			continue
		}
		if stalled := f.moved.Add(stallTimeout); stalled.After(now) && stalled.After(until) {
			until = stalled
		}
	}
	if len(o.followers) == 0 && o.grace.After(now) {
		until = o.grace
	}
	return until
}

// follow begins a continuous read at the given byte number.
func (o *output) follow(at int64) *follower {
	o.mu.Lock()
	defer o.mu.Unlock()
	f := &follower{o: o, at: min(max(at, 0), o.next), moved: time.Now()}
	o.followers[f] = struct{}{}
	o.grace = time.Time{} // from here on, the process waits for its followers
	return f
}

// peek begins a single read of what is there. The process does not wait for it.
func (o *output) peek(at int64) *follower {
	o.mu.Lock()
	defer o.mu.Unlock()
	return &follower{o: o, at: min(max(at, 0), o.next), moved: time.Now()}
}

// close ends the read.
func (f *follower) close() {
	f.o.mu.Lock()
	defer f.o.mu.Unlock()
	delete(f.o.followers, f)
	f.o.changed()
}

// piece is the result of a read.
type piece struct {
	n       int
	at      int64 // number of its first byte
	dropped int64 // how many bytes before it were dropped unread
	end     bool  // the stream or the session has ended, and everything was read
}

// read copies the next bytes. With wait, it waits until there is something to report.
func (f *follower) read(ctx context.Context, p []byte, wait bool) (piece, error) {
	o := f.o
	for {
		o.mu.Lock()
		got := piece{at: max(f.at, o.first)}
		got.dropped = got.at - f.at
		for got.n < len(p) && got.at+int64(got.n) < o.next {
			at := got.at + int64(got.n) - o.first
			got.n += copy(p[got.n:], o.chunks[at/chunkSize][at%chunkSize:])
		}
		f.at = got.at + int64(got.n)
		got.end = f.at == o.next && (o.closed || o.ended)
		if got.n > 0 || got.dropped > 0 {
			f.moved = time.Now()
			o.changed()
		}
		if got.n > 0 || got.dropped > 0 || got.end || !wait {
			o.mu.Unlock()
			return got, nil
		}
		ch := o.change()
		o.mu.Unlock()
		select {
		case <-ch:
		case <-ctx.Done():
			return got, context.Cause(ctx)
		}
	}
}

// end is called when the session has ended and its output has been read.
func (o *output) end() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	o.changed()
}

// forget frees the bytes. Further output is read and dropped, so that a process that outlives its session does not die
// of a closed pipe.
func (o *output) forget() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.forgotten = true
	o.trim()
	if o.closed {
		o.release()
	}
	o.changed()
}

// numbers returns the oldest byte that is kept and the next one.
func (o *output) numbers() (first, next int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.first, o.next
}

// close is called when no more bytes will come.
func (o *output) close() {
	o.readMu.Lock()
	defer o.readMu.Unlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	if n := len(o.chunks); n > 0 {
		o.chunks[n-1] = slices.Clone(o.chunks[n-1]) // most sessions write little
	}
	if o.forgotten {
		o.release()
	}
	o.changed()
}

// release frees the memory. The caller holds mu; nothing is written any more, or nobody can read it.
func (o *output) release() {
	o.budget.used.Add(-int64(len(o.chunks)) * chunkSize)
	o.first, o.chunks = o.next, nil
}
