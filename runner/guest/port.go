package guest

import (
	"bufio"
	"context"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// portsTime bounds how long an agent may take to list its ports.
const portsTime = 5 * time.Second

// Ports lists the listening sockets of the guest.
func (c *Client) Ports(ctx context.Context) (guestapi.Ports, error) {
	var out guestapi.Ports
	err := c.call(ctx, portsTime, http.MethodGet, guestapi.PathPorts, nil, &out)
	return out, err
}

// DialPort connects to a listener on the loopback of the guest. The error is PORT_CLOSED if there is none. ctx bounds the dial only. The
// result can be closed for writing, and is then read for ten seconds at most (see muxConfig).
func (c *Client) DialPort(ctx context.Context, port int) (net.Conn, error) {
	path := strings.Replace(guestapi.PathPortConnect, "{port}", strconv.Itoa(port), 1)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, guestURL+path, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", guestapi.UpgradeTCP)
	conn, err := c.open(ctx)
	if err != nil {
		return nil, callError(ctx, err, path)
	}
	cut := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) }) // this ends reads and writes
	bound := &io.LimitedReader{R: conn, N: maxHeaderBytes}
	from := bufio.NewReader(bound)
	err = upgrade(ctx, conn, from, req, path)
	if !cut() && err == nil {
		err = callError(ctx, context.Cause(ctx), path)
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	bound.N = math.MaxInt64
	return &portConn{Conn: conn, from: from}, nil
}

// upgrade sends the request and reads the answer up to the first byte of the connection.
func upgrade(ctx context.Context, conn net.Conn, from *bufio.Reader, req *http.Request, path string) error {
	if err := req.Write(conn); err != nil {
		return callError(ctx, err, path)
	}
	res, err := http.ReadResponse(from, req)
	switch {
	case err != nil && (ctx.Err() != nil || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF)):
		return callError(ctx, err, path)
	case err != nil:
		return protocolError(err, "its answer to %s is not understood", path)
	case res.StatusCode == http.StatusSwitchingProtocols:
		return nil
	}
	defer res.Body.Close()
	return problem(ctx, res, path)
}

// portConn is a connection to a port, with what was read ahead of it.
type portConn struct {
	net.Conn
	from io.Reader
}

func (p *portConn) Read(b []byte) (int, error) { return p.from.Read(b) }

// CloseWrite ends the direction to the guest.
func (p *portConn) CloseWrite() error { return p.Close() } // a stream that is closed can still be read
