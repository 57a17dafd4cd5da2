package arbor

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const (
	maxInput = 64 << 10         // bytes of a message of a client
	sendTime = time.Minute      // for a client to read a message
	pingTime = 30 * time.Second // between pings: proxies take silence for the end
)

// attach joins a WebSocket and a session: each message of the client is input, and each message to it is output, without any frame of
// their own. Standard error comes between standard output.
func (l *layer) attach(w http.ResponseWriter, r *http.Request) {
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		writeFailure(w, shared.Failf(http.StatusBadRequest, "this route is for WebSockets"))
		return
	}
	pass, ok := l.passes.take(r.PathValue("id"), r.URL.Query().Get("token"))
	if !ok {
		writeFailure(w, shared.Failf(http.StatusUnauthorized, "the token is not known, was used, or has expired; POST /v1/sessions/{id}/attach gives another one"))
		return
	}
	leave, err := l.streams.enter(pass.owner)
	if err != nil {
		writeFailure(w, err)
		return
	}
	defer leave()
	shared.Unhurry(w)
	ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		return // it has answered
	}
	defer ws.CloseNow() //nolint:errcheck // it may be closed already
	ws.SetReadLimit(maxInput)
	ctx, left := context.WithCancel(r.Context())
	defer left() // after the close frame: the end of a context that reads ends the connection
	err = l.as(pass.key).join(ctx, left, ws, pass.session)
	switch {
	case ctx.Err() != nil: // the client has left
	case err != nil:
		l.Log.InfoContext(ctx, "a WebSocket was closed before the end of its session", "session_id", pass.session, "err", err)
		_ = ws.Close(websocket.StatusInternalError, reasonOf(err))
	default:
		_ = ws.Close(websocket.StatusNormalClosure, "the session has ended")
	}
}

// reasonOf says why a WebSocket is closed. A close frame has room for 123 bytes.
func reasonOf(err error) string {
	const most = 120
	reason := strings.ToValidUTF8(err.Error(), "?")
	if len(reason) > most {
		reason = strings.ToValidUTF8(reason[:most], "")
	}
	return reason
}

// join carries input and output until the output ends, or ctx does. It calls left if the client has left.
func (c caller) join(ctx context.Context, left func(), ws *websocket.Conn, session string) error {
	s, err := c.Session(ctx, session)
	if err != nil {
		return err
	}
	go c.input(ctx, left, ws, session)
	go beat(ctx, left, ws)
	offsets := map[string]int64{coppice.Stdout: s.StdoutFirst}
	if !s.PTY {
		offsets[coppice.Stderr] = s.StderrFirst
	}
	out := output{ctx, ws}
	group, outputs := errgroup.WithContext(ctx)
	for stream, offset := range offsets {
		group.Go(func() error { return c.Follow(outputs, session, stream, offset, out) })
	}
	return group.Wait()
}

// input writes the messages of a client to the session. Once the session takes no input, further messages are dropped; the output goes on.
func (c caller) input(ctx context.Context, left func(), ws *websocket.Conn, session string) {
	defer left()
	for taken := true; ; {
		_, message, err := ws.Read(ctx)
		if err != nil {
			return
		}
		if taken {
			taken = c.WriteStdin(ctx, session, strings.NewReader(string(message)), false) == nil
		}
	}
}

// beat notices a client that has gone without a word.
func beat(ctx context.Context, left func(), ws *websocket.Conn) {
	for tick := time.NewTicker(pingTime); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
		if ping(ctx, ws) != nil {
			tick.Stop()
			left()
			return
		}
	}
}

func ping(ctx context.Context, ws *websocket.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, sendTime)
	defer cancel()
	return ws.Ping(ctx)
}

// output writes to a WebSocket. Several streams may use it at once.
type output struct {
	ctx context.Context
	ws  *websocket.Conn
}

func (o output) Write(p []byte) (int, error) {
	ctx, cancel := context.WithTimeout(o.ctx, sendTime)
	defer cancel()
	return len(p), o.ws.Write(ctx, websocket.MessageBinary, p)
}
