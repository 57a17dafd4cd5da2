package guestapi

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/iotest"
	"time"

	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// socketPair is a byte stream with a buffer, like a virtio port.
func socketPair(t *testing.T) (host, guest net.Conn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if host, err = net.Dial("unix", path); err != nil {
		t.Fatal(err)
	}
	if guest, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = host.Close(), guest.Close() })
	return host, guest
}

func write(t *testing.T, w io.Writer, b []byte) {
	t.Helper()
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
}

func hello(dial byte, count byte) []byte {
	r := record{version: Version}
	for i := range dialLen {
		r.nonce[i] = dial
	}
	r.nonce[nonceLen-1] = count
	return r.bytes()
}

// guestEnd runs the guest's end of a stream like the agent: it reads each link until it ends, then accepts the next. It
// delivers a link when the first byte of data has arrived on it.
type guestEnd struct {
	links chan *Link
	over  chan struct{} // tells guestEnd that the test has read the link to its end
}

func runGuest(t *testing.T, s Stream) (*Channel, *guestEnd) {
	t.Helper()
	c, e, done := NewChannel(s), &guestEnd{links: make(chan *Link), over: make(chan struct{})}, make(chan struct{})
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	go func() {
		defer close(done)
		for {
			l, err := c.Accept()
			if err != nil {
				return
			}
			var b [1]byte
			if _, err := io.ReadFull(l, b[:]); err == nil {
				select {
				case e.links <- l:
				case <-ctx.Done():
				}
				select {
				case <-e.over:
				case <-ctx.Done():
				}
			}
			_ = l.Close()
		}
	}()
	t.Cleanup(func() {
		cancel()
		_ = c.Close()
		<-done
	})
	return c, e
}

// session greets and returns both ends of the new link.
func session(t *testing.T, conn net.Conn, e *guestEnd) (host, guest *Link) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	host, err := Greet(ctx, conn)
	if err != nil {
		t.Fatalf("greet: %v", err)
	}
	go func() { _, _ = host.Write([]byte{0}) }()
	return host, <-e.links
}

// exchange sends data both ways and checks it.
func exchange(t *testing.T, host, guest *Link) {
	t.Helper()
	for _, dir := range []struct{ from, to *Link }{{host, guest}, {guest, host}} {
		// Yamux's first byte is 0; after it comes data that looks like handshakes in every way.
		want := append([]byte{0}, hello(1, 1)...)
		want = append(append(want, magic[:7]...), magic[:7]...)
		want = append(append(want, magic[:7]...), stuffing, magic[7], 0xC0, 0xC0)
		want = append(append(want, magic[:]...), magic[:5]...)
		errc := make(chan error, 1)
		go func() {
			var err error
			for _, part := range [][]byte{want[:1], want[1:9], want[9:12], want[12:]} {
				if _, e := dir.from.Write(part); e != nil {
					err = e
				}
			}
			errc <- err
		}()
		got := make([]byte, len(want))
		if _, err := io.ReadFull(dir.to, got); err != nil {
			t.Fatalf("read: %v", err)
		}
		if err := <-errc; err != nil {
			t.Fatalf("write: %v", err)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("got  %x\nwant %x", got, want)
		}
	}
}

func TestGreet(t *testing.T) {
	t.Parallel()
	garbage := make([]byte, 5000)
	_, _ = rand.Read(garbage)
	announced := record{version: Version}.bytes()
	cases := []struct {
		name             string
		toGuest, toHost  []byte // already in the pipe
		hostTwice, small bool
	}{
		{name: "clean"},
		{name: "garbage both ways", toGuest: garbage, toHost: garbage},
		{name: "half a record", toGuest: hello(9, 1)[:11], toHost: hello(9, 1)[:20]},
		{name: "half a magic", toGuest: magic[:6], toHost: magic[:3]},
		{name: "a magic without its end", toGuest: magic[:7], toHost: magic[:7]},
		{name: "hellos of a host that gave up", toGuest: bytes.Repeat(hello(9, 1), 300), toHost: bytes.Repeat(hello(9, 1), 10)},
		{name: "data of an old session", toGuest: append(hello(9, 1), 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0)},
		{name: "an announcement", toHost: announced},
		{name: "an answer of version 0", toHost: append(append(magic[:len(magic):len(magic)], 0), make([]byte, nonceLen)...)},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			hc, gc := socketPair(t)
			write(t, hc, tc.toGuest)
			write(t, gc, tc.toHost)
			_, e := runGuest(t, gc.(Stream))
			host, guest := session(t, hc, e)
			exchange(t, host, guest)
			if host.PeerVersion() != Version || guest.PeerVersion() != Version {
				t.Errorf("versions %d and %d, want %d", host.PeerVersion(), guest.PeerVersion(), Version)
			}
		})
	}
}

// TestGreetOverPipe uses a stream without a buffer, where each write waits for its reader.
func TestGreetOverPipe(t *testing.T) {
	t.Parallel()
	hc, gc := net.Pipe()
	defer func() { _ = hc.Close() }()
	_, e := runGuest(t, gc)
	host, guest := session(t, hc, e)
	exchange(t, host, guest)
}

// TestSupersede greets again in the middle of a session, like the host of a clone: the guest is in the middle of
// whatever its parent last received.
func TestSupersede(t *testing.T) {
	t.Parallel()
	for _, cut := range [][]byte{nil, {0, 0, 0}, magic[:4], magic[:7], append(magic[:7:7], stuffing), hello(7, 7)[:19]} {
		hc, gc := socketPair(t)
		_, e := runGuest(t, gc.(Stream))
		host, guest := session(t, hc, e)
		exchange(t, host, guest)
		write(t, hc, cut) // below the link
		go func() {
			_, err := io.Copy(io.Discard, guest)
			if !errors.Is(err, ErrSuperseded) {
				t.Errorf("cut %x: the old link ended with %v", cut, err)
			}
			e.over <- struct{}{}
		}()
		host, guest = session(t, hc, e)
		exchange(t, host, guest)
	}
}

// TestOldLinkIsMute: nothing of an old session follows an answer, even if a write of that session was blocked.
func TestOldLinkIsMute(t *testing.T) {
	t.Parallel()
	hc, gc := socketPair(t)
	_, e := runGuest(t, gc.(Stream))
	host, old := session(t, hc, e)
	exchange(t, host, old)
	blocked := make(chan error, 1)
	go func() {
		junk := bytes.Repeat([]byte("old "), 1<<20)
		for {
			if _, err := old.Write(junk); err != nil {
				blocked <- err
				return
			}
		}
	}()
	go func() {
		_, _ = io.Copy(io.Discard, old)
		e.over <- struct{}{}
	}()
	host, guest := session(t, hc, e)
	if err := <-blocked; err == nil {
		t.Fatal("the old link could still write")
	}
	if _, err := old.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write on an old link: %v, want %v", err, net.ErrClosed)
	}
	if _, err := old.Read(make([]byte, 1)); !errors.Is(err, ErrSuperseded) {
		t.Errorf("read on an old link: %v, want %v", err, ErrSuperseded)
	}
	exchange(t, host, guest)
}

// TestRestartedAgent: the host notices that a new agent is behind a session.
func TestRestartedAgent(t *testing.T) {
	t.Parallel()
	hc, gc := socketPair(t)
	_, e := runGuest(t, gc.(Stream))
	host, guest := session(t, hc, e)
	exchange(t, host, guest)
	write(t, gc, []byte{0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0}) // the old agent died inside a frame
	NewChannel(gc.(Stream)).Announce(time.Second)
	if _, err := io.Copy(io.Discard, host); !errors.Is(err, ErrSuperseded) {
		t.Fatalf("the host's link ended with %v, want %v", err, ErrSuperseded)
	}
}

func TestGreetEndsWithItsContext(t *testing.T) {
	t.Parallel()
	hc, gc := socketPair(t)
	go func() { // a guest that sends much and never answers
		for {
			if _, err := gc.Write(bytes.Repeat(hello(3, 3), 100)); err != nil {
				return
			}
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := Greet(ctx, hc); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v, want %v", err, context.DeadlineExceeded)
	}
	if _, err := hc.Write([]byte{1}); err == nil {
		t.Error("the connection is still open")
	}
}

func TestGreetFailsWhenThePeerCloses(t *testing.T) {
	t.Parallel()
	hc, gc := socketPair(t)
	_ = gc.Close()
	if _, err := Greet(t.Context(), hc); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("got %v, want the end of the stream", err)
	}
}

// FuzzCodec: data is decoded unchanged, wherever the stream is cut, and a record after it is recognized.
func FuzzCodec(f *testing.F) {
	f.Add([]byte("plain"), 3)
	f.Add(magic[:], 1)
	f.Add(append(magic[:7:7], magic[:7]...), 5)
	f.Add(append(append(magic[:7:7], stuffing), magic[7]), 2)
	f.Add(bytes.Repeat([]byte{0xC0}, 20), 7)
	f.Add(append(hello(2, 2), hello(3, 3)[:9]...), 4)
	f.Fuzz(func(t *testing.T, data []byte, cut int) {
		cut = 1 + abs(cut)%64
		var wire bytes.Buffer
		var e encoder
		for rest := data; len(rest) > 0; {
			n := min(cut, len(rest))
			wire.Write(e.encode(rest[:n]))
			rest = rest[n:]
		}
		if bytes.Contains(wire.Bytes(), magic[:]) {
			t.Fatalf("the magic is inside data: %x", wire.Bytes())
		}
		want := record{version: 3, nonce: [16]byte(hello(4, 4)[magicLen+1:])}
		wire.Write(want.bytes())
		for _, r := range []io.Reader{bytes.NewReader(wire.Bytes()), iotest.OneByteReader(bytes.NewReader(wire.Bytes()))} {
			d := newDecoder(r)
			var got []byte
			buf := make([]byte, cut)
			for {
				n, rec, err := d.next(buf)
				got = append(got, buf[:n]...)
				if err != nil {
					t.Fatalf("no record: %v", err)
				}
				if rec == nil {
					continue
				}
				if *rec != want {
					t.Fatalf("record %+v, want %+v", rec, want)
				}
				break
			}
			// The seven bytes of the magic before its last byte are delivered as data, because the decoder cannot know.
			if !bytes.Equal(got, append(slices.Clip(data), magic[:7]...)) {
				t.Fatalf("got  %x\nwant %x", got, data)
			}
		}
	})
}

// FuzzAccept: whatever is in the stream, the next hello is answered, or at the latest the one after a failed attempt.
func FuzzAccept(f *testing.F) {
	f.Add([]byte{})
	f.Add(hello(1, 1))
	f.Add(hello(1, 1)[:12])
	f.Add(append(hello(1, 1), hello(2, 1)[:24]...))
	f.Add(append(hello(1, 1), []byte("GET / HTTP/1.1\r\n\r\n")...))
	f.Add(magic[:7])
	f.Fuzz(func(t *testing.T, before []byte) {
		var in bytes.Buffer
		in.Write(before)
		in.Write(hello(8, 1)) // may be swallowed by a record that was cut off
		in.Write(hello(8, 2))
		out := &script{in: &in}
		c := NewChannel(out)
		l, err := c.Accept()
		if err != nil {
			t.Fatalf("not accepted: %v", err)
		}
		if want := hello(8, 2); l.dial != [dialLen]byte(want[magicLen+1:]) || !bytes.Equal(out.out.Bytes(), want) {
			t.Fatalf("answered %x, want %x", out.out.Bytes(), want)
		}
	})
}

// script is a stream whose whole input is available at once.
type script struct {
	in  *bytes.Buffer
	out bytes.Buffer
}

func (s *script) Read(p []byte) (int, error)       { return s.in.Read(p) }
func (s *script) Write(p []byte) (int, error)      { return s.out.Write(p) }
func (s *script) Close() error                     { return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }

func abs(n int) int {
	if n < 0 {
		return -(n + 1)
	}
	return n
}
