package fakeguest

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

// attachment is a WebSocket that is joined to the session which the request names.
type attachment struct {
	g    *Guest
	r    *http.Request
	conn *websocket.Conn
}

// attachSession joins a session's streams to a WebSocket until the session or the connection ends.
func (g *Guest) attachSession(w http.ResponseWriter, r *http.Request) error {
	streams := []string{"stdout", "stderr"}
	var offsets [2]int64
	for i, name := range streams {
		var err error
		if offsets[i], err = startOf(r, name+"_offset"); err != nil {
			return err
		}
	}
	var info guestapi.Session
	look := func(s *State) (err error) { info, err = s.info(r); return err }
	if err := g.view(look); err != nil {
		return err
	}
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true, CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		return nil // Accept has answered
	}
	defer func() { _ = conn.CloseNow() }() // closed before, or broken
	a := &attachment{g: g, r: r, conn: conn}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	var input, output sync.WaitGroup
	defer input.Wait()
	defer cancel()
	input.Go(func() {
		defer cancel()
		a.input(ctx)
	})
	for i, name := range streams {
		output.Go(func() {
			if a.output(ctx, byte(i)+guestapi.AttachStdout, name, offsets[i]) != nil {
				cancel()
			}
		})
	}
	output.Wait()
	if ctx.Err() != nil {
		return nil
	}
	if g.view(look) == nil && a.say(ctx, guestapi.AttachMessage{Type: guestapi.AttachExit, Session: &info}) == nil {
		_ = conn.Close(websocket.StatusNormalClosure, "") // the host may be faster
	}
	return nil
}

func (a *attachment) say(ctx context.Context, m guestapi.AttachMessage) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return a.conn.Write(ctx, websocket.MessageText, b)
}

// pieceBytes bounds the output in a message.
const pieceBytes = 16 << 10

func (a *attachment) output(ctx context.Context, kind byte, name string, offset int64) error {
	for {
		got, err := a.g.read(ctx, a.r, name, offset, true)
		if err != nil {
			return err
		}
		if got.at > offset {
			if err := a.say(ctx, guestapi.AttachMessage{Type: guestapi.AttachTruncated, Stream: name, From: offset, To: got.at}); err != nil {
				return err
			}
		}
		piece := got.data[:min(len(got.data), pieceBytes)]
		if len(piece) > 0 {
			b := append(binary.BigEndian.AppendUint64([]byte{kind}, uint64(got.at)), piece...)
			if err := a.conn.Write(ctx, websocket.MessageBinary, b); err != nil {
				return err
			}
		}
		offset = got.at + int64(len(piece))
		if got.ended && len(piece) == len(got.data) {
			return nil
		}
	}
}

// input executes the host's frames until the connection ends.
func (a *attachment) input(ctx context.Context) {
	for {
		kind, b, err := a.conn.Read(ctx)
		if err != nil || a.g.pass(ctx) != nil { // a frozen program reads nothing
			return
		}
		err = a.g.update(func(s *State) error {
			n, err := s.named(a.r)
			switch {
			case err != nil:
				return err
			case kind == websocket.MessageBinary:
				return s.input(n, b, false)
			}
			return s.control(n, b)
		})
		if err != nil && a.say(ctx, guestapi.AttachMessage{Type: guestapi.AttachError, Problem: guestapi.ProblemOf(err)}) != nil {
			return
		}
	}
}

func (s *State) control(n *Session, b []byte) error {
	var m guestapi.AttachMessage
	if err := json.Unmarshal(b, &m); err != nil {
		return core.Errorf(core.Invalid, core.CodeMalformedBody, "the message cannot be read: %s", core.Clip(err.Error()))
	}
	switch m.Type {
	case guestapi.AttachResize:
		return nil
	case guestapi.AttachSignal:
		return n.signal(m.Signal)
	case guestapi.AttachCloseStdin:
		if !n.StdinOpen {
			return nil
		}
		return s.input(n, nil, true)
	}
	return core.Errorf(core.Invalid, core.CodeInvalidField, "the message type %q is not known", core.Clip(m.Type))
}
