package egress

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/internal/sidecar"
)

// Process says how the egress process is started.
type Process struct {
	Dir     string   // for its socket; made if it is not there
	Command []string // runs a host.Server, with what Config says on its standard input
	Config  []byte
	Cgroup  func() (*os.File, error) // see sidecar.Process
	Pulse   Pulse
}

const name = "egress process"

func (p Process) sidecar() sidecar.Process {
	return sidecar.Process{Name: name, Dir: p.Dir, Command: p.Command, Config: p.Config, Cgroup: p.Cgroup, Confine: true}
}

// SocketPath is where the process of a directory listens.
func SocketPath(dir string) string { return sidecar.Process{Dir: dir}.SocketPath() }

// Ensure makes sure that a process runs. It keeps the one that runs already, whoever has started it; otherwise it starts a new one. That
// process goes on when this one ends.
func Ensure(ctx context.Context, p Process) (*Client, egressapi.Hello, error) {
	c := NewClient(SocketPath(p.Dir))
	c.pulse = p.Pulse.WithDefaults()
	h, err := c.greet(ctx)
	switch {
	case errors.Is(err, errSilent) && ctx.Err() == nil: // also one that another runner has started
		if err := c.kill(ctx); err != nil {
			return nil, h, err
		}
	case err == nil && h.Version != egressapi.Version: // the next process gets its sandboxes again; until then nothing passes
		if err := c.Stop(ctx); err != nil {
			return nil, h, err
		}
	case err == nil:
		return c, h, nil
	case ctx.Err() != nil:
		return nil, h, err
	}
	err = p.sidecar().Start(ctx, func(ctx context.Context) (err error) {
		h, err = c.Hello(ctx)
		return err
	})
	return c, h, err
}

// Client is a way to an egress process. It is safe for concurrent use.
type Client struct {
	socket string
	pulse  Pulse
}

// NewClient returns a client of the process that listens at a path. Nothing is dialled yet.
func NewClient(socket string) *Client { return &Client{socket, Pulse{}.WithDefaults()} }

// ErrGone is returned, wrapped, when no process answers.
var ErrGone = core.Errorf(core.Unavailable, core.CodeEgressGone, "the egress process of this runner does not answer")

// callTime bounds a call.
const callTime = 15 * time.Second

func (c *Client) call(ctx context.Context, r egressapi.Request, files ...*os.File) (egressapi.Response, error) {
	return c.within(ctx, callTime, r, files...)
}

func (c *Client) within(ctx context.Context, limit time.Duration, r egressapi.Request, files ...*os.File) (egressapi.Response, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errors.Join(ErrGone, errSilent))
	defer cancel()
	return c.wait(ctx, r, files...)
}

// wait is a call that may take as long as ctx.
func (c *Client) wait(ctx context.Context, r egressapi.Request, files ...*os.File) (out egressapi.Response, err error) {
	conn, err := sidecar.Dial(ctx, c.socket)
	if err != nil {
		return out, errors.Join(ErrGone, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	if err = sidecar.Send(conn, r, files...); err == nil {
		var strange []*os.File
		strange, err = sidecar.Receive(conn, &out)
		sidecar.CloseAll(strange)
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return out, context.Cause(ctx)
	case sidecar.IsFault(err): // of one message: the process is there
		return out, fmt.Errorf("ask the %s for %s: %w", name, r.Op, sidecar.Fault(err))
	case err != nil:
		return out, errors.Join(ErrGone, err)
	case out.Problem != nil:
		return out, out.Problem.Err()
	}
	return out, nil
}

// Hello asks who the process is.
func (c *Client) Hello(ctx context.Context) (egressapi.Hello, error) {
	out, err := c.call(ctx, egressapi.Request{Op: egressapi.OpHello})
	if err != nil {
		return egressapi.Hello{}, err
	}
	return *out.Hello, nil
}

// Put hands a sandbox and its sockets to the process, which serves it. The process gets copies: the caller still owns the sockets.
func (c *Client) Put(ctx context.Context, sb egressapi.Sandbox, sockets []*os.File) error {
	_, err := c.call(ctx, egressapi.Request{Op: egressapi.OpPut, Sandbox: &sb}, sockets...)
	return err
}

// SetRules replaces the rules of a sandbox, unless it has newer ones. NOT_FOUND when it is not served.
func (c *Client) SetRules(ctx context.Context, id core.SandboxID, rules runnerapi.EgressRules) error {
	_, err := c.call(ctx, egressapi.Request{Op: egressapi.OpRules, Sandbox: &egressapi.Sandbox{ID: id, Rules: rules}})
	return err
}

// Remove ends what a sandbox has open, and closes its sockets. One that is not served is no error.
func (c *Client) Remove(ctx context.Context, id core.SandboxID) error {
	_, err := c.call(ctx, egressapi.Request{Op: egressapi.OpRemove, Sandbox: &egressapi.Sandbox{ID: id}})
	return err
}

// maxListed bounds the sandboxes that a process is heard of: a host has far fewer.
const maxListed = 1 << 17

// List returns the served sandboxes. It sends further requests until the list is complete.
func (c *Client) List(ctx context.Context) (all []egressapi.Served, err error) {
	for from := core.SandboxID(""); ; {
		out, err := c.call(ctx, egressapi.Request{Op: egressapi.OpList, From: from})
		if err != nil {
			return nil, err
		}
		all = append(all, out.Served...)
		if !out.More {
			return all, nil
		}
		n := len(out.Served)
		if n == 0 || out.Served[n-1].ID <= from || len(all) > maxListed {
			return nil, core.Errorf(core.Internal, core.CodeInternal, "the %s does not come to the end of its sandboxes: %d are listed, and more follow", name, len(all))
		}
		from = out.Served[n-1].ID
	}
}

// Flows acknowledges a batch by its last record, and waits for the next. What was not acknowledged comes again.
func (c *Client) Flows(ctx context.Context, after int64) (egressapi.Batch, error) {
	out, err := c.wait(ctx, egressapi.Request{Op: egressapi.OpFlows, After: after})
	if err != nil {
		return egressapi.Batch{}, err
	}
	return *out.Batch, nil
}

// Stats counts.
func (c *Client) Stats(ctx context.Context) (egressapi.Stats, error) {
	out, err := c.call(ctx, egressapi.Request{Op: egressapi.OpStats})
	if err != nil {
		return egressapi.Stats{}, err
	}
	return *out.Stats, nil
}

// Watch waits for the end of the process (ErrGone) or of ctx.
func (c *Client) Watch(ctx context.Context) error {
	_, err := c.wait(ctx, egressapi.Request{Op: egressapi.OpWatch})
	return err
}

// Stop ends the process, and kills it if it does not answer. It returns when the process and all its sockets are gone.
func (c *Client) Stop(ctx context.Context) error {
	h, err := c.Hello(ctx)
	if err == nil {
		err = sidecar.End(name, h.PID, func() error {
			_, err := c.call(ctx, egressapi.Request{Op: egressapi.OpStop})
			return err
		})
	}
	if errors.Is(err, errSilent) && ctx.Err() == nil {
		return c.kill(ctx)
	}
	return err
}
