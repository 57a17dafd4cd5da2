//go:build linux

package sessions

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"net/http"
	"sync"

	"github.com/coder/websocket"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// maxFrame bounds a frame from the host, and so how much is read ahead for a process that does not read its stdin.
const maxFrame = 256 << 10

// attachment is one attached WebSocket.
type attachment struct {
	s    *session
	conn *websocket.Conn
}

// attachSession joins a session's streams to a WebSocket until the session or the connection ends. The end of the
// connection does not affect the session.
func (m *Server) attachSession(w http.ResponseWriter, r *http.Request) error {
	s, err := m.session(r)
	if err != nil {
		return err
	}
	now, err := fromNow(r)
	if err != nil {
		return err
	}
	offsets := [2]int64{now, now}
	for i, name := range []string{"stdout_offset", "stderr_offset"} {
		if offsets[i], err = answer.IntParam(r, name, offsets[i]); err != nil {
			return err
		}
	}
	// The origin is not checked: the host decides who may connect.
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true, CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		return nil // Accept has answered
	}
	conn.SetReadLimit(maxFrame)
	defer func() { _ = conn.CloseNow() }()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()

	at := &attachment{s: s, conn: conn}
	var wg sync.WaitGroup
	wg.Go(func() {
		at.input(ctx)
		cancel()
	})
	// Both streams have a follower from here on, so neither loses bytes while the other is sent.
	followers := []*follower{s.stdout.follow(offsets[0])}
	if s.stderr != nil {
		followers = append(followers, s.stderr.follow(offsets[1]))
	}
	var out sync.WaitGroup
	for i, f := range followers {
		out.Go(func() {
			defer f.close()
			if err := at.output(ctx, f, byte(i)+guestapi.AttachStdout, []string{"stdout", "stderr"}[i]); err != nil {
				cancel()
			}
		})
	}
	out.Wait()
	if ctx.Err() == nil {
		at.finish(ctx)
	}
	cancel()
	wg.Wait()
	return nil
}

// finish waits for the end of the session, whose streams have already ended, and reports it.
func (at *attachment) finish(ctx context.Context) {
	select {
	case <-at.s.done:
	case <-ctx.Done():
		return
	}
	info := at.s.snapshot()
	if at.say(ctx, guestapi.AttachMessage{Type: guestapi.AttachExit, Session: &info}) == nil {
		_ = at.conn.Close(websocket.StatusNormalClosure, "")
	}
}

func (at *attachment) say(ctx context.Context, m guestapi.AttachMessage) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return at.conn.Write(ctx, websocket.MessageText, b)
}

// output sends a stream to its end.
func (at *attachment) output(ctx context.Context, f *follower, kind byte, name string) error {
	buf := make([]byte, guestapi.AttachHeadLen+32<<10)
	buf[0] = kind
	for {
		got, err := f.read(ctx, buf[guestapi.AttachHeadLen:], true)
		if err != nil {
			return err
		}
		if got.dropped > 0 {
			if err := at.say(ctx, guestapi.AttachMessage{Type: guestapi.AttachTruncated, Stream: name, From: got.at - got.dropped, To: got.at}); err != nil {
				return err
			}
		}
		if got.n > 0 {
			binary.BigEndian.PutUint64(buf[1:], uint64(got.at))
			if err := at.conn.Write(ctx, websocket.MessageBinary, buf[:guestapi.AttachHeadLen+got.n]); err != nil {
				return err
			}
		}
		if got.end {
			return nil
		}
	}
}

// input executes the host's frames until the connection ends.
func (at *attachment) input(ctx context.Context) {
	for {
		kind, b, err := at.conn.Read(ctx)
		if err != nil {
			return
		}
		if kind == websocket.MessageBinary {
			err = at.s.writeStdin(bytes.NewReader(b), ctx.Done())
		} else {
			err = at.control(b)
		}
		if err != nil && at.say(ctx, guestapi.AttachMessage{Type: guestapi.AttachError, Problem: guestapi.ProblemOf(err)}) != nil {
			return
		}
	}
}

func (at *attachment) control(b []byte) error {
	var m guestapi.AttachMessage
	if err := json.Unmarshal(b, &m); err != nil {
		return core.Errorf(core.Invalid, core.CodeMalformedBody, "the message cannot be read: %s", core.Clip(err.Error()))
	}
	switch m.Type {
	case guestapi.AttachResize:
		return at.s.resize(m.Cols, m.Rows)
	case guestapi.AttachSignal:
		sig, err := parseSignal(m.Signal)
		if err != nil {
			return err
		}
		return at.s.signal(sig, guestapi.TargetForeground)
	case guestapi.AttachCloseStdin:
		at.s.closeStdin()
		return nil
	}
	return core.Errorf(core.Invalid, core.CodeInvalidField, "the message type %q is not known", core.Clip(m.Type))
}
