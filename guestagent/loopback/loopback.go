//go:build linux

package loopback

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// Connect joins the stream of a request to a listener on the loopback of the guest, which no connection from outside
// reaches. Like a TCP connection, the stream may end in one direction first.
func Connect(w http.ResponseWriter, r *http.Request) error {
	port, err := strconv.ParseUint(r.PathValue("port"), 10, 16)
	if err != nil || port == 0 || r.Header.Get("Upgrade") != guestapi.UpgradeTCP {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "a connection to a port needs its number and Upgrade: %s", guestapi.UpgradeTCP)
	}
	inside, err := dialLoopback(r.Context(), strconv.Itoa(int(port)))
	if err != nil {
		return err
	}
	defer func() { _ = inside.Close() }()
	outside, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return core.Wrapf(err, core.Internal, core.CodeInternal, "the connection cannot be taken over")
	}
	defer func() { _ = outside.Close() }()
	cut := context.AfterFunc(r.Context(), func() { _ = errors.Join(inside.Close(), outside.Close()) }) // the link has ended, and with it this stream
	defer cut()
	if _, err := io.WriteString(outside, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+guestapi.UpgradeTCP+"\r\n\r\n"); err != nil {
		return nil // the host is gone
	}
	// The server's reader ends the request's context at the end of what it reads, so only what it has read ahead comes from it.
	from := io.MultiReader(io.LimitReader(buffered, int64(buffered.Reader.Buffered())), outside)
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := io.Copy(inside, from); err != nil {
			_ = inside.Close() // the link has ended: so does the connection
			return
		}
		_ = inside.CloseWrite()
	})
	wg.Go(func() {
		_, _ = io.Copy(outside, inside)
		if half, ok := outside.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
			return
		}
		_ = outside.Close() // of a stream of the link: ends this direction only
	})
	wg.Wait()
	return nil
}

// dialLoopback connects to a port of either loopback address.
func dialLoopback(ctx context.Context, port string) (*net.TCPConn, error) {
	var d net.Dialer
	for _, host := range []string{"127.0.0.1", "::1"} {
		conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, port))
		if tcp, ok := conn.(*net.TCPConn); err == nil && ok {
			return tcp, nil
		}
		if !errors.Is(err, unix.ECONNREFUSED) && host == "127.0.0.1" {
			return nil, core.Wrapf(err, core.Unavailable, core.CodePortClosed, "port %s of the sandbox cannot be reached", port)
		}
	}
	return nil, core.Errorf(core.Unavailable, core.CodePortClosed, "no program in the sandbox listens on port %s", port)
}
