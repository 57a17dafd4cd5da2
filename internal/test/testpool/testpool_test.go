package testpool

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// TestLink looks at a namespace from both sides, and that nothing is left of it.
func TestLink(t *testing.T) {
	require.Root(t)
	require.That(t, "netns", exec.Command("nsenter", "--version").Run() == nil, "apt-get install util-linux")
	l, err := NewLink()
	if err != nil {
		t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp4", l.Near+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	said := make(chan string, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			said <- err.Error()
			return
		}
		defer conn.Close()
		b, _ := io.ReadAll(conn)
		said <- conn.RemoteAddr().(*net.TCPAddr).IP.String() + " " + string(b)
	}()
	host, port, _ := net.SplitHostPort(listener.Addr().String())
	if out, err := exec.CommandContext(t.Context(), "nsenter", "--net="+l.Path, "--", "bash", "-c", "printf hello >/dev/tcp/"+host+"/"+port).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got, want := <-said, l.Far+" hello"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(l.Path); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", l.Path, err)
	}
	if _, err := net.InterfaceByName(l.name); err == nil {
		t.Errorf("the link %s is left", l.name)
	}
}

// relayTo has a relay before a server that serves each connection.
func relayTo(t *testing.T, serve func(net.Conn)) *Relay {
	t.Helper()
	origin, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = origin.Close() })
	go func() {
		for {
			conn, err := origin.Accept()
			if err != nil {
				return
			}
			go func() {
				serve(conn)
				_ = conn.Close()
			}()
		}
	}()
	r, err := NewRelay(t.Context(), "127.0.0.1:0", origin.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestRelayHold has a relay take connections and bytes while it passes nothing, and carry them afterwards.
func TestRelayHold(t *testing.T) {
	t.Parallel()
	r := relayTo(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
	r.Hold()
	r.Hold()
	say := func() net.Conn {
		t.Helper()
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", r.Address())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	conn := say()
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 5)
	if n, err := conn.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%q came through, %v", b[:n], err)
	}
	if n := r.Sent() + r.Received(); n != 0 {
		t.Errorf("%d bytes were carried", n)
	}
	r.Resume()
	r.Resume()
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, b); err != nil || string(b) != "hello" {
		t.Fatalf("%q, %v", b, err)
	}
	r.Hold()
	silent := say()
	defer silent.Close()
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(silent, b); err == nil {
		t.Error("a connection outlives its relay")
	}
}

// TestRelay counts what each side says, and ends with connections that are open.
func TestRelay(t *testing.T) {
	t.Parallel()
	r := relayTo(t, func(conn net.Conn) {
		_, _ = conn.Write([]byte("answer"))
		_, _ = io.Copy(io.Discard, conn)
	})
	dial := func(ctx context.Context) net.Conn {
		t.Helper()
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", r.Address())
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, len("answer"))
		if _, err := io.ReadFull(conn, b); err != nil || string(b) != "answer" {
			t.Fatalf("%q, %v", b, err)
		}
		return conn
	}
	one := dial(t.Context())
	if _, err := one.Write([]byte("ask")); err != nil {
		t.Fatal(err)
	}
	_ = one.(*net.TCPConn).CloseWrite()
	_, _ = io.ReadAll(one)
	_ = one.Close()
	open := dial(t.Context())
	defer open.Close()
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if _, err := open.Read(make([]byte, 1)); err == nil {
		t.Error("a connection outlives its relay")
	}
	if r.Sent() != 3 || r.Received() != 12 {
		t.Errorf("%d bytes were sent and %d received, want 3 and 12", r.Sent(), r.Received())
	}
}
