package guest

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// How long a call may take when its context says nothing.
const (
	healthTimeout  = 10 * time.Second
	controlTimeout = 30 * time.Second
	flushMargin    = 2 * time.Second // over what the agent was given: a capture waits for it, and goes on without it
	resealTimeout  = 90 * time.Second
)

// greetPatience is how long one connection waits for the agent before another is tried.
const greetPatience = 2 * time.Second

// redialInterval is the pause before another connection is tried when the last one broke in the handshake.
const redialInterval = 20 * time.Millisecond

// Client is a connection to one sandbox's agent. It is safe for concurrent use. It does not reconnect: when Done is
// closed, dial again (sessions live on in the agent).
type Client struct {
	mux     *yamux.Session
	guard   *guard
	version int
	control *http.Transport
	public  *http.Transport
	opening chan struct{} // requests that the multiplexer may keep waiting for a stream

	features features
}

// Dial connects and greets until an agent answers or ctx ends. connect makes one connection to the sandbox's channel; it
// is called again when a connection breaks before the answer, and a failure of its own ends Dial. An agent that has not
// started yet, or a clone that has just been resumed, is simply waited for, so ctx needs a deadline.
// The error has code GUEST_UNREACHABLE, or TIMED_OUT or CANCELED by ctx.
func Dial(ctx context.Context, connect func(ctx context.Context) (net.Conn, error)) (*Client, error) {
	for {
		conn, err := connect(ctx)
		if err != nil {
			return nil, unreachable(err, "its channel does not accept a connection")
		}
		// A connection may stay without an answer for ever: that of a machine whose last one ended in a pause (see vmm.Machine's
		// DialAgent), or of a guest that was restored in the middle of something. The next one is answered at once.
		attempt, cancel := context.WithTimeout(ctx, greetPatience)
		link, err := guestapi.Greet(attempt, conn)
		cancel()
		if err == nil {
			return newClient(link)
		}
		if ctx.Err() != nil {
			return nil, unreachable(context.Cause(ctx), "it has not answered in time")
		}
		retry := time.NewTimer(redialInterval)
		select {
		case <-ctx.Done():
			retry.Stop()
			return nil, unreachable(errors.Join(context.Cause(ctx), err), "it has not answered in time")
		case <-retry.C:
		}
	}
}

func unreachable(err error, what string) error {
	return core.Wrapf(err, core.Unavailable, core.CodeGuestUnreachable, "the sandbox's agent cannot be reached: %s", what)
}

func newClient(link *guestapi.Link) (*Client, error) {
	c := &Client{guard: newGuard(link), version: link.PeerVersion(), opening: make(chan struct{}, maxOpening)}
	mux, err := yamux.Client(c.guard, muxConfig())
	if err != nil {
		return nil, errors.Join(unreachable(err, "the multiplexer was not set up"), link.Close())
	}
	c.mux = mux
	c.guard.watch(mux)
	c.control = c.transport(controlHeaderTimeout)
	c.public = c.transport(publicHeaderTimeout)
	return c, nil
}

// muxConfig bounds what a guest can make the host keep: streams that the guest opens are refused by the guard, and each
// stream that the host opens buffers one window. There is no keep-alive, which would be a timer in the guest: a
// guest that is gone shows when its VMM closes the channel, and one that hangs shows by the deadline of the call.
func muxConfig() *yamux.Config {
	cfg := yamux.DefaultConfig()
	cfg.AcceptBacklog = maxOpening
	cfg.EnableKeepAlive = false
	cfg.StreamOpenTimeout = 0 // a VM may be paused for longer than any fixed time; the call's deadline decides
	cfg.StreamCloseTimeout = 10 * time.Second
	cfg.ConnectionWriteTimeout = 30 * time.Second
	cfg.LogOutput = io.Discard
	return cfg
}

// Version is the protocol version that the agent speaks.
func (c *Client) Version() int { return c.version }

// Done is closed when the connection has ended.
func (c *Client) Done() <-chan struct{} { return c.mux.CloseChan() }

// Close ends the connection. Sessions go on in the guest.
func (c *Client) Close() error {
	err := c.mux.Close()
	c.control.CloseIdleConnections()
	c.public.CloseIdleConnections()
	return err
}

// Health asks how the agent is.
func (c *Client) Health(ctx context.Context) (guestapi.Health, error) {
	var h guestapi.Health
	err := c.call(ctx, healthTimeout, http.MethodGet, guestapi.PathHealth, nil, &h)
	return cleanHealth(h), err
}

// Quiesce stops new sessions and freezes the workload. NOT_QUIESCED names the process that would not freeze; the workload
// runs again then. It is idempotent for one capture id.
func (c *Client) Quiesce(ctx context.Context, req guestapi.QuiesceRequest) (guestapi.QuiesceResponse, error) {
	var out guestapi.QuiesceResponse
	limit := controlTimeout + time.Duration(req.TimeoutMS+req.FlushMS)*time.Millisecond
	err := c.call(ctx, limit, http.MethodPost, guestapi.PathQuiesce, req, &out)
	out.StaleProcesses = cleanProcesses(out.StaleProcesses)
	out.CaptureID, out.Generation, out.Workload = core.Clip(out.CaptureID), core.Clip(out.Generation), cleanWorkload(out.Workload)
	return out, err
}

// Flush asks that what the guest has written reaches its disk. The agents of early images cannot: that is a NotFound.
func (c *Client) Flush(ctx context.Context, req guestapi.FlushRequest) (guestapi.FlushResponse, error) {
	var out guestapi.FlushResponse
	err := c.call(ctx, flushMargin+time.Duration(req.TimeoutMS)*time.Millisecond, http.MethodPost, guestapi.PathFlush, req, &out)
	return out, err
}

// Reseed gives the captured machine fresh randomness, before its release. VerifyReseed judges the answer.
func (c *Client) Reseed(ctx context.Context, req guestapi.ReseedRequest) (guestapi.ReseedResponse, error) {
	var out guestapi.ReseedResponse
	if err := checkEntropy(req.Entropy); err != nil {
		return out, err
	}
	err := c.call(ctx, controlTimeout, http.MethodPost, guestapi.PathReseed, req, &out)
	out.Steps = cleanSteps(out.Steps)
	return out, err
}

// Reseal makes a clone another machine. The report is to be judged by Verify, whatever it says of itself; a report with a
// failed step comes without an error.
func (c *Client) Reseal(ctx context.Context, req guestapi.ResealRequest) (core.ResealReport, error) {
	var out core.ResealReport
	if err := checkEntropy(req.Entropy); err != nil {
		return out, err
	}
	err := c.call(ctx, resealTimeout, http.MethodPost, guestapi.PathReseal, req, &out)
	out.Steps, out.StaleProcesses = cleanSteps(out.Steps), cleanProcesses(out.StaleProcesses)
	out.Generation = core.Clip(out.Generation)
	return out, err
}

// Release thaws the workload.
func (c *Client) Release(ctx context.Context, req guestapi.ReleaseRequest) (guestapi.ReleaseResponse, error) {
	var out guestapi.ReleaseResponse
	err := c.call(ctx, controlTimeout, http.MethodPost, guestapi.PathRelease, req, &out)
	out.Generation, out.State = core.Clip(out.Generation), guestapi.State(core.Clip(string(out.State)))
	return out, err
}

// checkEntropy refuses what would make two clones equal, before it is sent.
func checkEntropy(b []byte) error {
	if len(b) != guestapi.EntropySize {
		return core.Errorf(core.Internal, core.CodeResealFailed, "the host has %d bytes of entropy for the guest; it takes %d", len(b), guestapi.EntropySize)
	}
	for _, c := range b {
		if c != b[0] {
			return nil
		}
	}
	return core.Errorf(core.Internal, core.CodeResealFailed, "the host's entropy for the guest is one repeated byte")
}
