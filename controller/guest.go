package controller

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// What the guest's agent says, as far as the controller passes it on. guestagent/guestapi defines it; a test compares the two.
// Everything in it is the guest's word and so untrusted: it is bounded, typed and shown, never believed.
type (
	// GuestSession is an exec session as the agent holds it.
	GuestSession struct {
		ID          core.SessionID `json:"id"`
		Command     []string       `json:"command"`
		Cwd         string         `json:"cwd"`
		User        string         `json:"user,omitempty"`
		PTY         bool           `json:"pty"`
		State       string         `json:"state"`
		PID         int            `json:"pid"`
		ExitCode    *int           `json:"exit_code,omitempty"`
		Signal      string         `json:"signal,omitempty"`
		TimedOut    bool           `json:"timed_out"`
		StartedAt   time.Time      `json:"started_at"`
		EndedAt     *time.Time     `json:"ended_at,omitempty"`
		StdinOpen   bool           `json:"stdin_open"`
		StdoutBytes int64          `json:"stdout_bytes"`
		StderrBytes int64          `json:"stderr_bytes"`
		StdoutFirst int64          `json:"stdout_first"`
		StderrFirst int64          `json:"stderr_first"`
	}

	// ExecRequest asks for a program to be run.
	ExecRequest struct {
		Command   []string          `json:"command"`
		Cwd       string            `json:"cwd,omitempty"`
		Env       map[string]string `json:"env,omitempty"`
		Stdin     []byte            `json:"stdin,omitempty"`
		StdinOpen bool              `json:"stdin_open,omitempty"`
		TimeoutMS int64             `json:"timeout_ms,omitempty"`
		PTY       bool              `json:"pty,omitempty"`
		Cols      uint16            `json:"cols,omitempty"`
		Rows      uint16            `json:"rows,omitempty"`
		User      string            `json:"user,omitempty"`
	}

	// Process is one process of the workload, as it is seen from inside it.
	Process struct {
		PID      int    `json:"pid"`
		PPID     int    `json:"ppid"`
		Comm     string `json:"comm"`
		Cmdline  string `json:"cmdline"`
		State    string `json:"state"`
		RSSBytes int64  `json:"rss_bytes"`
	}

	guestExec struct {
		ID core.SessionID `json:"id"`
		ExecRequest
	}
	guestSessions struct {
		Sessions []GuestSession `json:"sessions"`
	}
	guestProcesses struct {
		Processes []Process `json:"processes"`
	}
	guestSignal struct {
		Signal string `json:"signal"`
	}
	guestResize struct {
		Cols uint16 `json:"cols"`
		Rows uint16 `json:"rows"`
	}
)

// GuestExited is the State of a session whose program has ended.
const GuestExited = "exited"

const (
	maxGuestJSON   = 32 << 20 // a list of sessions with long command lines
	maxGuestText   = 500      // of an error's message
	guestCallTime  = 60 * time.Second
	pathSessions   = "/v1/sessions"
	pathProcesses  = "/v1/processes"
	headerContent  = "Content-Type"
	contentJSON    = "application/json"
	contentRaw     = "application/octet-stream"
	guestWaitSlice = 20 * time.Second // of one wait call: an idle connection is never older
)

// reach returns a workspace whose guest may be spoken to, and counts as use of it. While it is being captured the agent itself
// lets requests wait. A suspended one is resumed first if it is to be resumed on use.
func (c *Controller) reach(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (Workspace, error) {
	w, err := c.Workspace(ctx, project, id)
	if err == nil {
		w, err = c.awaken(ctx, w)
	}
	if err != nil {
		return w, err
	}
	c.used(w)
	return w, reachable(w)
}

func reachable(w Workspace) error {
	if w.State != core.WorkspaceReady && w.State != core.WorkspaceCheckpointing {
		return notReady(w)
	}
	return nil
}

// Guest returns the way to the agent of a workspace that is ready: a transport for its public routes.
func (c *Controller) Guest(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (http.RoundTripper, error) {
	w, err := c.reach(ctx, project, id)
	if err != nil {
		return nil, err
	}
	return c.guestOf(w), nil
}

// guestOf returns the transport to a guest. What streams through it is use of its workspace.
func (c *Controller) guestOf(w Workspace) http.RoundTripper {
	way := c.runners.Guest(w.Sandbox.Endpoint, w.Sandbox.ID)
	if w.Rest.IdleAfter == 0 {
		return way
	}
	return usingTransport{way, &c.uses, w.ID}
}

// Console returns the tail of a workspace's serial console. The caller closes it.
func (c *Controller) Console(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (io.ReadCloser, error) {
	w, err := c.Workspace(ctx, project, id)
	if err != nil {
		return nil, err
	}
	if w.Sandbox.ID == "" {
		return nil, notReady(w)
	}
	return c.runners.Console(ctx, w.Sandbox.Endpoint, w.Sandbox.ID)
}

// Processes lists the processes of the workload.
func (c *Controller) Processes(ctx context.Context, project core.ProjectID, id core.WorkspaceID) ([]Process, error) {
	w, err := c.reach(ctx, project, id)
	if err != nil {
		return nil, err
	}
	var out guestProcesses
	err = c.callGuest(ctx, w.Sandbox, http.MethodGet, pathProcesses, nil, nil, &out)
	return out.Processes, err
}

// callGuest sends JSON to the agent and reads its answer. in and out may be nil.
func (c *Controller) callGuest(ctx context.Context, s Sandbox, method, path string, query url.Values, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, guestCallTime)
	defer cancel()
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return fmt.Errorf("encode request to the guest: %w", err)
		}
		body = bytes.NewReader(b)
	}
	res, err := c.askGuest(ctx, s, method, path, query, contentJSON, body)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(res.Body, maxGuestJSON)).Decode(out); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return core.Wrapf(err, core.Unavailable, core.CodeGuestProtocol, "the guest's agent gave an answer that cannot be read")
	}
	return nil
}

// askGuest sends a request and returns an answer with a status below 300, whose body the caller closes.
func (c *Controller) askGuest(ctx context.Context, s Sandbox, method, path string, query url.Values, content string, body io.Reader) (*http.Response, error) {
	target := url.URL{Scheme: "http", Host: "guest", Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, target.String(), body)
	if err != nil {
		return nil, fmt.Errorf("make request to the guest: %w", err)
	}
	if body != nil {
		req.Header.Set(headerContent, content)
	}
	res, err := c.runners.Guest(s.Endpoint, s.ID).RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode < http.StatusMultipleChoices {
		return res, nil
	}
	err = GuestProblem(res)
	return nil, errors.Join(err, res.Body.Close())
}

var codeForm = regexp.MustCompile(`^[A-Z][A-Z0-9_]{1,63}$`)

// GuestProblem turns an answer of 300 or more, of a runner or of an agent behind it, into an error. It reads the body and does
// not close it.
func GuestProblem(res *http.Response) error {
	var p runnerapi.Problem
	if err := json.NewDecoder(io.LimitReader(res.Body, 64<<10)).Decode(&p); err != nil || !codeForm.MatchString(string(p.Code)) {
		return core.Errorf(core.Unavailable, core.CodeGuestProtocol, "the guest's agent answered with status %d and no reason", res.StatusCode)
	}
	if p.Code == core.CodeSandboxNotFound {
		return core.Errorf(core.Unavailable, core.CodeSandboxLost, "the workspace's sandbox is gone from its runner; the workspace will be lost")
	}
	text := clipText(p.Message)
	switch p.Category {
	case core.NotFound, core.AlreadyExists, core.Invalid, core.Conflict, core.FailedPrecondition, core.Exhausted, core.Unavailable, core.TimedOut:
		return core.Errorf(p.Category, p.Code, "%s", text)
	case core.PermissionDenied: // inside the guest; the caller's own rights are not in question
		return core.Errorf(core.FailedPrecondition, p.Code, "%s", text)
	case core.Unauthenticated, core.DataLoss, core.Canceled, core.Internal:
	}
	return core.Errorf(core.Unavailable, core.CodeGuestProtocol, "the guest's agent failed: %s (%s)", text, p.Code)
}

// clipText bounds foreign text and makes it printable.
func clipText(s string) string {
	b := []byte(s[:min(len(s), maxGuestText)])
	for i, ch := range b {
		if ch < 0x20 || ch > 0x7e {
			b[i] = '?'
		}
	}
	return string(b)
}
