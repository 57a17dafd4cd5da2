package runnerclient

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// ConnectPort connects to a port of a guest. ctx bounds the dial only. The error is PORT_CLOSED if no program listens.
func (c *Client) ConnectPort(ctx context.Context, endpoint string, sandbox core.SandboxID, port int) (net.Conn, error) {
	transport, base, err := c.route(endpoint)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, c.timeouts.Call, errTimeout)
	defer cancel()
	path := strings.Replace(with(runnerapi.PathSandboxConnect, sandbox, ""), "{port}", strconv.Itoa(port), 1)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base.JoinPath(path).String(), nil)
	if err != nil {
		return nil, fmt.Errorf("make request to the runner: %w", err)
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", runnerapi.UpgradeTCP)
	c.authorize(req)
	res, err := transport.RoundTrip(req)
	if err != nil {
		return nil, unreachable(ctx, err)
	}
	if stream, ok := res.Body.(io.ReadWriteCloser); ok && res.StatusCode == http.StatusSwitchingProtocols {
		return &portConn{stream}, nil
	}
	return nil, errors.Join(problem(res), res.Body.Close())
}

// portConn is a connection to a port of a guest. It has no deadlines and no addresses of its own.
type portConn struct{ io.ReadWriteCloser }

// portAddr is the address of either end.
type portAddr struct{}

func (portAddr) Network() string { return runnerapi.UpgradeTCP }
func (portAddr) String() string  { return "guest" }

// LocalAddr is the same for all.
func (*portConn) LocalAddr() net.Addr { return portAddr{} }

// RemoteAddr is the same for all.
func (*portConn) RemoteAddr() net.Addr { return portAddr{} }

// SetDeadline is not supported.
func (*portConn) SetDeadline(time.Time) error { return os.ErrNoDeadline }

// SetReadDeadline is not supported.
func (*portConn) SetReadDeadline(time.Time) error { return os.ErrNoDeadline }

// SetWriteDeadline is not supported.
func (*portConn) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }
