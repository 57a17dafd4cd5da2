package coppice

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"
)

// Output streams of a session.
const (
	Stdout = "stdout"
	Stderr = "stderr"
)

// Exec runs a program and returns when it has ended. It returns only the last MiB of each output stream; Run returns
// everything.
func (c *Client) Exec(ctx context.Context, id WorkspaceID, req ExecRequest) (ExecResult, error) {
	var out ExecResult
	req.Wait = new(true)
	err := c.call(ctx, creation("v1", "workspaces", id, "exec").json(req), &out)
	return out, err
}

// Output returns what the program wrote to stdout and stderr, decoded.
func (r *ExecResult) Output() (stdout, stderr []byte, err error) {
	return decodeOutput(r.Stdout, r.Stderr, r.Encoding == EncodingBase64)
}

func decodeOutput(out, errs string, encoded bool) (stdout, stderr []byte, err error) {
	if !encoded {
		return []byte(out), []byte(errs), nil
	}
	stdout, err1 := base64.StdEncoding.DecodeString(out)
	stderr, err2 := base64.StdEncoding.DecodeString(errs)
	return stdout, stderr, errors.Join(err1, err2)
}

// StartSession starts a program and returns its session at once.
func (c *Client) StartSession(ctx context.Context, id WorkspaceID, req ExecRequest) (Session, error) {
	var out Session
	req.Wait = new(false)
	err := c.call(ctx, creation("v1", "workspaces", id, "exec").json(req), &out)
	return out, err
}

// Run starts a program, copies all its output as it arrives, and returns the session when the program has ended. A nil
// writer discards. When ctx ends, the program goes on running; its session is returned with the error.
func (c *Client) Run(ctx context.Context, id WorkspaceID, req ExecRequest, stdout, stderr io.Writer) (Session, error) {
	session, err := c.StartSession(ctx, id, req)
	if err != nil {
		return session, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for stream, w := range map[string]io.Writer{Stdout: stdout, Stderr: stderr} {
		if w == nil || (session.PTY && stream == Stderr) {
			continue
		}
		wg.Go(func() {
			if err := c.Follow(ctx, session.ID, stream, 0, w); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return session, context.Cause(ctx)
	}
	return c.WaitSession(ctx, session.ID)
}

// Sessions iterates over the sessions of a workspace's present epoch, newest first.
func (c *Client) Sessions(ctx context.Context, id WorkspaceID) iter.Seq2[Session, error] {
	return all[Session](ctx, c, get("v1", "workspaces", id, "sessions"))
}

// Session returns the present state of a session.
func (c *Client) Session(ctx context.Context, id SessionID) (Session, error) {
	return c.session(ctx, id, 0)
}

// WaitSession returns a session when its program has ended.
func (c *Client) WaitSession(ctx context.Context, id SessionID) (Session, error) {
	var gone away
	for {
		s, err := c.session(ctx, id, waitSeconds)
		if err == nil && s.State == SessionExited {
			return s, nil
		}
		if err == nil {
			gone.back()
		} else if err := gone.endure(ctx, err); err != nil {
			return s, err
		}
		if ctx.Err() != nil {
			return s, context.Cause(ctx)
		}
	}
}

func (c *Client) session(ctx context.Context, id SessionID, wait int) (Session, error) {
	var out Session
	q := url.Values{}
	if wait > 0 {
		q.Set("wait", strconv.Itoa(wait))
	}
	err := c.call(ctx, get("v1", "sessions", id).with(q), &out)
	return out, err
}

// DeleteSession kills a session's processes and deletes the session.
func (c *Client) DeleteSession(ctx context.Context, id SessionID) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "sessions", id}}, nil)
}

// SignalSession sends a signal, such as "SIGTERM", to a session's foreground processes.
func (c *Client) SignalSession(ctx context.Context, id SessionID, signal string) error {
	return c.call(ctx, post("v1", "sessions", id, "signal").json(SignalRequest{Signal: signal}), nil)
}

// ResizeSession sets the size of a session's terminal.
func (c *Client) ResizeSession(ctx context.Context, id SessionID, cols, rows int) error {
	return c.call(ctx, post("v1", "sessions", id, "resize").json(ResizeRequest{Cols: cols, Rows: rows}), nil)
}

// WriteStdin streams r to the standard input of a session that was started with StdinOpen, and closes it if closeAfter
// is set.
func (c *Client) WriteStdin(ctx context.Context, id SessionID, r io.Reader, closeAfter bool) error {
	if r == nil {
		r = http.NoBody
	}
	return c.call(ctx, request{
		method: http.MethodPost, path: []string{"v1", "sessions", id, "stdin"},
		query: url.Values{"close": {strconv.FormatBool(closeAfter)}}, raw: r,
	}, nil)
}

// OutputReader reads one output stream of a session. Its Read returns io.EOF at the end of the requested output, and
// also when the connection was closed in an orderly way; Complete tells the two apart.
type OutputReader struct {
	// Offset is the position, in the stream, of the next byte that Read returns.
	Offset int64
	// Dropped is the number of bytes before the first one that are no longer kept.
	Dropped int64

	resp *http.Response
}

// Read returns the next bytes.
func (o *OutputReader) Read(p []byte) (int, error) {
	n, err := o.resp.Body.Read(p)
	o.Offset += int64(n)
	return n, err
}

// Close ends the read.
func (o *OutputReader) Close() error { return o.resp.Body.Close() }

// Complete reports, after io.EOF, whether the stream has ended and everything was read.
func (o *OutputReader) Complete() bool { return o.resp.Trailer.Get("Coppice-Eof") == "true" }

// SessionOutput reads one output stream from an offset: the present output or, with follow, also all later output.
func (c *Client) SessionOutput(ctx context.Context, id SessionID, stream string, offset int64, follow bool) (*OutputReader, error) {
	resp, err := c.send(ctx, get("v1", "sessions", id, "output").with(url.Values{ //nolint:bodyclose // the caller closes it
		"stream": {stream}, "offset": {strconv.FormatInt(offset, 10)}, "follow": {strconv.FormatBool(follow)},
	}))
	if err != nil {
		return nil, err
	}
	o := &OutputReader{Offset: offset, resp: resp}
	if at, err := strconv.ParseInt(resp.Header.Get("Coppice-Offset"), 10, 64); err == nil {
		o.Dropped, o.Offset = max(at-offset, 0), at
	}
	return o, nil
}

// The number of times that Follow connects again without receiving a byte, the time for which a server may be
// unreachable during a Follow or a wait, and the pause between tries.
const (
	followAttempts = 5
	awayFor        = time.Minute
	awayPause      = time.Second
)

// away tolerates a server that restarts: errors count only when nothing else happened for too long.
type away struct{ since time.Time }

// endure returns nil, after a pause, if the failed call should be made again.
func (a *away) endure(ctx context.Context, err error) error {
	if refused, ok := errors.AsType[*Error](err); ok {
		away := refused.Status == http.StatusServiceUnavailable || refused.Status == http.StatusBadGateway
		if !away || errors.Is(err, Code("SANDBOX_LOST")) || errors.Is(err, Code("RUNNER_LOST")) {
			return err
		}
	}
	if ctx.Err() != nil {
		return err
	}
	if a.since.IsZero() {
		a.since = time.Now()
	}
	if time.Since(a.since) > awayFor {
		return err
	}
	timer := time.NewTimer(awayPause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}

func (a *away) back() { a.since = time.Time{} }

// Follow copies one output stream from an offset to w until the stream ends. After a lost connection it connects again
// and continues. Bytes that the session no longer keeps are an error.
func (c *Client) Follow(ctx context.Context, id SessionID, stream string, offset int64, w io.Writer) error {
	var gone away
	for idle := 0; ; {
		o, err := c.SessionOutput(ctx, id, stream, offset, true)
		if err != nil {
			if err := gone.endure(ctx, err); err != nil {
				return err
			}
			continue
		}
		gone.back()
		if o.Dropped > 0 {
			return errors.Join(fmt.Errorf("session %s: %d bytes of %s from offset %d are no longer kept", id, o.Dropped, stream, offset), o.Close())
		}
		writeErr, readErr := transfer(w, o)
		complete := readErr == nil && o.Complete()
		if err := errors.Join(writeErr, o.Close()); writeErr != nil {
			return err
		}
		if complete {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if idle++; o.Offset > offset {
			idle = 0
		}
		offset = o.Offset
		done, err := c.ended(ctx, id, stream, offset)
		if done {
			return nil
		}
		if err != nil {
			if err := gone.endure(ctx, err); err != nil {
				return err
			}
		}
		if idle >= followAttempts {
			return fmt.Errorf("session %s: %s broke off at offset %d: %w", id, stream, offset, errors.Join(readErr, io.ErrUnexpectedEOF))
		}
	}
}

// transfer copies until r ends and reports which side failed.
func transfer(w io.Writer, r io.Reader) (writeErr, readErr error) {
	buf := make([]byte, 64<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if _, werr := w.Write(buf[:n]); werr != nil {
				return werr, nil
			}
		}
		if errors.Is(err, io.EOF) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// ended reports whether a stream is known to have ended at an offset. It is for servers behind a proxy that drops
// trailers.
func (c *Client) ended(ctx context.Context, id SessionID, stream string, offset int64) (bool, error) {
	s, err := c.Session(ctx, id)
	if err != nil || s.State != SessionExited {
		return false, err
	}
	end := s.StdoutBytes
	if stream == Stderr {
		end = s.StderrBytes
	}
	return offset >= end, nil
}
