package arbor

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The size of a terminal for which the client names none.
const (
	defaultCols = 220
	defaultRows = 50
)

type execRequest struct {
	Command []string    `json:"command"`
	Cwd     string      `json:"cwd"`
	PTY     bool        `json:"pty"`
	Env     coppice.Env `json:"env"`
	Cols    int         `json:"cols"`
	Rows    int         `json:"rows"`
	User    string      `json:"user"`
	Timeout int64       `json:"timeout_ms"`
}

// exec starts a program and does not wait for its end.
func exec(r *http.Request, c call) (answer, error) {
	var q execRequest
	if err := c.read(&q); err != nil {
		return answer{}, err
	}
	req := coppice.ExecRequest{Command: q.Command, Cwd: q.Cwd, Env: q.Env, User: q.User, TimeoutMS: q.Timeout}
	if q.PTY {
		req.PTY, req.StdinOpen, req.Cols, req.Rows = true, true, q.Cols, q.Rows
		if req.Cols == 0 && req.Rows == 0 {
			req.Cols, req.Rows = defaultCols, defaultRows
		}
	}
	s, err := c.StartSession(r.Context(), c.id, req)
	if err != nil {
		return answer{}, err
	}
	body, err := with(s, map[string]any{"session_id": s.ID, "status": "starting", "attachable": true})
	return answer{http.StatusAccepted, body}, err
}

// pass lets a WebSocket be attached to a session, once.
func pass(r *http.Request, c call) (answer, error) {
	s, err := c.Session(r.Context(), c.id)
	if err != nil {
		return answer{}, err
	}
	token, until, err := c.layer.passes.give(s.ID, c.key)
	if err != nil {
		return answer{}, err
	}
	scheme := "ws"
	if r.TLS != nil {
		scheme = "wss"
	}
	at := fmt.Sprintf("%s://%s/v1/attach/%s?token=%s", scheme, r.Host, s.ID, token)
	return answer{http.StatusOK, map[string]any{"transport": "websocket", "url": at, "expires_at": until.UTC()}}, nil
}

// attach joins a WebSocket and a session: each message of the client is input, and each message to it is output, without any frame of
// their own. Standard error comes between standard output.
func (l *layer) attach(w http.ResponseWriter, r *http.Request) {
	key, ok := l.passes.take(r.PathValue("id"), r.URL.Query().Get("token"))
	if !ok {
		writeFailure(w, shared.Failf(http.StatusUnauthorized, "the token is not known, was used, or has expired; POST /v1/sessions/{id}/attach gives another one"))
		return
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		writeFailure(w, shared.Failf(http.StatusBadRequest, "this route is for WebSockets"))
		return
	}
	leave, err := l.streams.enter(key)
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
	switch err := l.as(key).join(r.Context(), ws, r.PathValue("id")); {
	case err == nil:
		_ = ws.Close(websocket.StatusNormalClosure, "the session has ended")
	case errors.As(err, new(*coppice.Error)):
		_ = ws.Close(websocket.StatusInternalError, reasonOf(err))
	}
}

// maxInput bounds a message of a client.
const maxInput = 64 << 10

// reasonOf is why a WebSocket was closed, of which 123 bytes are possible.
func reasonOf(err error) string {
	const most = 120
	reason := strings.ToValidUTF8(err.Error(), "?")
	for len(reason) > most {
		reason = strings.ToValidUTF8(reason[:most], "")
	}
	return reason
}

// join carries input and output until the session ends, or the client leaves.
func (c caller) join(ctx context.Context, ws *websocket.Conn, session string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.Session(ctx, session)
	if err != nil {
		return err
	}
	go func() { // it ends with the connection
		defer cancel()
		c.input(ctx, ws, session)
	}()
	streams := []string{coppice.Stdout}
	if !s.PTY {
		streams = append(streams, coppice.Stderr)
	}
	out := output{ctx, ws}
	group, outputs := errgroup.WithContext(ctx)
	for _, stream := range streams {
		group.Go(func() error {
			offset := s.StdoutFirst
			if stream == coppice.Stderr {
				offset = s.StderrFirst
			}
			return c.Follow(outputs, session, stream, offset, out)
		})
	}
	return group.Wait()
}

// input writes the messages of a client to the session. The end of the connection does not end the session.
func (c caller) input(ctx context.Context, ws *websocket.Conn, session string) {
	for {
		_, r, err := ws.Reader(ctx)
		if err != nil {
			return
		}
		if err := c.WriteStdin(ctx, session, r, false); err != nil {
			return
		}
	}
}

// output writes to a WebSocket. Several streams may use it at once.
type output struct {
	ctx context.Context
	ws  *websocket.Conn
}

// sendTime is how long a client may take to read a message.
const sendTime = time.Minute

func (o output) Write(p []byte) (int, error) {
	ctx, cancel := context.WithTimeout(o.ctx, sendTime)
	defer cancel()
	return len(p), o.ws.Write(ctx, websocket.MessageBinary, p)
}
