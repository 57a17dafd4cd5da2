package fakevmm

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"net/http"
	"sync"

	"github.com/coder/websocket"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// attachSession joins a session's streams to a WebSocket until the session or the connection ends.
func (a *agent) attachSession(w http.ResponseWriter, r *http.Request) error {
	id := core.SessionID(r.PathValue("id"))
	streams := []string{"stdout", "stderr"}
	var offsets [2]int64
	for i, name := range streams {
		var err error
		if offsets[i], err = intParam(r, name+"_offset"); err != nil {
			return err
		}
	}
	if _, err := a.info(id); err != nil {
		return err
	}
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true, CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		return nil // Accept has answered
	}
	defer func() { _ = conn.CloseNow() }() // closed before, or broken
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	var input, output sync.WaitGroup
	defer input.Wait()
	defer cancel()
	input.Go(func() {
		defer cancel()
		a.attachInput(ctx, r, conn)
	})
	for i, name := range streams {
		output.Go(func() {
			if a.attachOutput(ctx, conn, id, byte(i)+guestapi.AttachStdout, name, offsets[i]) != nil {
				cancel()
			}
		})
	}
	output.Wait()
	if ctx.Err() != nil {
		return nil
	}
	if info, err := a.info(id); err == nil {
		if say(ctx, conn, guestapi.AttachMessage{Type: guestapi.AttachExit, Session: &info}) == nil {
			_ = conn.Close(websocket.StatusNormalClosure, "") // the host may be faster
		}
	}
	return nil
}

func say(ctx context.Context, conn *websocket.Conn, m guestapi.AttachMessage) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return conn.Write(ctx, websocket.MessageText, b)
}

func (a *agent) attachOutput(ctx context.Context, conn *websocket.Conn, id core.SessionID, kind byte, name string, offset int64) error {
	for {
		got, err := a.read(ctx, id, name, offset, true)
		if err != nil {
			return err
		}
		if got.at > offset {
			if err := say(ctx, conn, guestapi.AttachMessage{Type: guestapi.AttachTruncated, Stream: name, From: offset, To: got.at}); err != nil {
				return err
			}
		}
		if len(got.data) > 0 {
			b := append(binary.BigEndian.AppendUint64([]byte{kind}, uint64(got.at)), got.data...)
			if err := conn.Write(ctx, websocket.MessageBinary, b); err != nil {
				return err
			}
		}
		offset = got.at + int64(len(got.data))
		if got.ended {
			return nil
		}
	}
}

// attachInput executes the host's frames until the connection ends.
func (a *agent) attachInput(ctx context.Context, r *http.Request, conn *websocket.Conn) {
	for {
		kind, b, err := conn.Read(ctx)
		if err != nil || a.pass(ctx) != nil { // a frozen program reads nothing
			return
		}
		err = a.with(r, func(s *agentState, n *session) error {
			if kind == websocket.MessageBinary {
				return s.stdin(n, b, false)
			}
			var m guestapi.AttachMessage
			if err := json.Unmarshal(b, &m); err != nil {
				return core.Errorf(core.Invalid, core.CodeMalformedBody, "the message cannot be read: %s", core.Clip(err.Error()))
			}
			switch m.Type {
			case guestapi.AttachResize:
				return nil
			case guestapi.AttachCloseStdin:
				if !n.StdinOpen {
					return nil
				}
				return s.stdin(n, nil, true)
			}
			return core.Errorf(core.Invalid, core.CodeInvalidField, "the message type %q is not known", core.Clip(m.Type))
		})
		if err != nil && say(ctx, conn, guestapi.AttachMessage{Type: guestapi.AttachError, Problem: guestapi.ProblemOf(err)}) != nil {
			return
		}
	}
}
