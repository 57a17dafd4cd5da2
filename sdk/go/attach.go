package coppice

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	"github.com/coder/websocket"
)

// AttachOptions says where to start. The zero value starts at the oldest byte that the session still keeps.
type AttachOptions struct {
	StdoutOffset int64
	StderrOffset int64
	FromNow      bool // only output from now on, whatever the offsets say; old guest agents answer with the code UNSUPPORTED
}

// Attached is a live connection to a session. One goroutine may call Next while others call the rest.
type Attached struct {
	conn *websocket.Conn
}

// AttachEvent is an event of an attached session: output, or a message.
type AttachEvent struct {
	Stream  string         // Stdout or Stderr; empty for a message
	Offset  int64          // of Data in the stream
	Data    []byte         // valid until the next call of Next
	Message *AttachMessage // exit, truncated or error; nil for output
}

// The longest message that the client accepts from the server, and the head of a binary message: stream, offset.
const (
	maxAttachMessage = 4 << 20
	attachHead       = 9
)

// Attach connects to a session: directly to its runner if possible, otherwise through the server. The connection lives
// as long as ctx, or until Close; its end does not affect the session.
func (c *Client) Attach(ctx context.Context, id SessionID, opts AttachOptions) (*Attached, error) {
	a, err := c.attach(ctx, id, opts, "")
	var refused *Error
	if err != nil && errors.As(err, new(*unsentError)) && !errors.As(err, &refused) && ctx.Err() == nil {
		return c.attach(ctx, id, opts, "controller") // the runner's data plane cannot be reached from here
	}
	return a, err
}

// AttachGrant returns the address and the token for attaching a WebSocket to a session, for callers with their own
// WebSocket library.
func (c *Client) AttachGrant(ctx context.Context, id SessionID) (Attachment, error) {
	return c.attachGrant(ctx, id, "")
}

func (c *Client) attachGrant(ctx context.Context, id SessionID, via string) (Attachment, error) {
	req := post("v1", "sessions", id, "attach")
	if via != "" {
		req.query = url.Values{"via": {via}}
	}
	var out Attachment
	err := c.call(ctx, req, &out)
	return out, err
}

func (c *Client) attach(ctx context.Context, id SessionID, opts AttachOptions, via string) (*Attached, error) {
	grant, err := c.attachGrant(ctx, id, via)
	if err != nil {
		return nil, err
	}
	if grant.Transport != TransportWebsocket {
		return nil, fmt.Errorf("attach to session %s: the server offers transport %q, which this client does not speak", id, grant.Transport)
	}
	target, err := url.Parse(grant.URL)
	if err != nil {
		return nil, fmt.Errorf("attach to session %s: %w", id, withoutAddress(err))
	}
	dial, header, straight := c.http, http.Header{"User-Agent": {c.agent}}, target.IsAbs()
	q := target.Query()
	if straight {
		if dial, err = c.direct.client(grant.TLS); err != nil {
			return nil, err
		}
		header.Set("Authorization", "Bearer "+grant.Token)
	} else {
		target = c.base.ResolveReference(&url.URL{Path: c.base.Path + target.Path})
		set(q, "token", grant.Token)
	}
	if opts.FromNow {
		q.Set("from", "now")
	} else {
		q.Set("stdout_offset", strconv.FormatInt(opts.StdoutOffset, 10))
		q.Set("stderr_offset", strconv.FormatInt(opts.StderrOffset, 10))
	}
	target.RawQuery = q.Encode()
	conn, resp, err := websocket.Dial(ctx, target.String(), &websocket.DialOptions{ //nolint:bodyclose // closed by the library
		HTTPClient: dial, HTTPHeader: header, CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		if resp != nil && resp.StatusCode >= http.StatusBadRequest {
			return nil, problem(resp)
		}
		err = fmt.Errorf("attach to session %s: %w", id, withoutAddress(err)) // the address contains the token
		if straight && resp == nil {
			err = &unsentError{err}
		}
		return nil, err
	}
	conn.SetReadLimit(maxAttachMessage)
	return &Attached{conn: conn}, nil
}

// Next returns the next event. After the message of type AttachExit there are no more.
func (a *Attached) Next(ctx context.Context) (AttachEvent, error) {
	kind, data, err := a.conn.Read(ctx)
	if err != nil {
		return AttachEvent{}, err
	}
	if kind == websocket.MessageText {
		var m AttachMessage
		if err := json.Unmarshal(data, &m); err != nil {
			return AttachEvent{}, fmt.Errorf("attached session: %w", err)
		}
		return AttachEvent{Message: &m}, nil
	}
	if len(data) < attachHead {
		return AttachEvent{}, fmt.Errorf("attached session: a message of %d bytes", len(data))
	}
	e := AttachEvent{Stream: Stdout, Offset: int64(binary.BigEndian.Uint64(data[1:attachHead])), Data: data[attachHead:]} //nolint:gosec // G115: the server counts bytes from 0
	switch data[0] {
	case 1:
	case 2:
		e.Stream = Stderr
	default:
		return AttachEvent{}, fmt.Errorf("attached session: output of a stream %d", data[0])
	}
	return e, nil
}

// Ping waits until the other end has answered. Meanwhile, another goroutine must be in Next.
func (a *Attached) Ping(ctx context.Context) error { return a.conn.Ping(ctx) }

// Write sends p to standard input.
func (a *Attached) Write(ctx context.Context, p []byte) error {
	return a.conn.Write(ctx, websocket.MessageBinary, p)
}

// Resize sets the size of the terminal.
func (a *Attached) Resize(ctx context.Context, cols, rows int) error {
	return a.send(ctx, AttachMessage{Type: AttachResize, Cols: cols, Rows: rows})
}

// Signal sends a signal, such as "SIGINT", to the session's foreground processes.
func (a *Attached) Signal(ctx context.Context, signal string) error {
	return a.send(ctx, AttachMessage{Type: AttachSignal, Signal: signal})
}

// CloseStdin closes standard input.
func (a *Attached) CloseStdin(ctx context.Context) error {
	return a.send(ctx, AttachMessage{Type: AttachCloseStdin})
}

// Close detaches. The session goes on.
func (a *Attached) Close() error {
	err := a.conn.Close(websocket.StatusNormalClosure, "")
	if errors.As(err, new(websocket.CloseError)) {
		return nil // the server was faster
	}
	return err
}

func (a *Attached) send(ctx context.Context, m AttachMessage) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return a.conn.Write(ctx, websocket.MessageText, b)
}
