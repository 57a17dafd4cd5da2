package arbor

import (
	"fmt"
	"net/http"

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
	if req.User == "" {
		req.User = "root" // Arbor's default, whatever user the image names
	}
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
	key, err := c.Self(r.Context())
	if err != nil {
		return answer{}, err
	}
	token, until, err := c.layer.passes.give(s.ID, c.key, key.ID)
	if err != nil {
		return answer{}, err
	}
	scheme := "ws"
	if r.TLS != nil || c.layer.Key == "" && r.Header.Get("X-Forwarded-Proto") == "https" {
		scheme = "wss"
	}
	at := fmt.Sprintf("%s://%s/v1/attach/%s?token=%s", scheme, r.Host, s.ID, token)
	return answer{http.StatusOK, map[string]any{"transport": "websocket", "url": at, "expires_at": until.UTC()}}, nil
}
