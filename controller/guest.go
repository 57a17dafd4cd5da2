package controller

import (
	"context"
	"io"
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// The parts of the guest agent's messages that the controller passes on. guestagent/guestapi defines them; a test compares the two.
// Everything in them comes from the guest and is untrusted: it is bounded, typed and shown, never believed.
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

	// Process is one process of the workload, as the guest reports it.
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

// guestWaitSlice is the longest time of one wait call: an idle connection is never older.
const guestWaitSlice = 20 * time.Second

// reach returns a workspace whose guest can get requests. The call counts as use of the workspace. During a capture the agent itself
// delays requests. A suspended workspace is resumed first if it has auto-resume.
func (c *Controller) reach(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (Workspace, error) {
	w, err := c.Workspace(ctx, project, id)
	if err == nil {
		w, err = c.awaken(ctx, w)
	}
	if err != nil {
		return w, err
	}
	c.used(w)
	return w, w.Reachable()
}

// Guest returns a transport for the public routes of the agent in a ready workspace.
func (c *Controller) Guest(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (http.RoundTripper, error) {
	w, err := c.reach(ctx, project, id)
	if err != nil {
		return nil, err
	}
	return c.guestOf(w), nil
}

// guestOf returns the transport to a guest. Streams through it count as use of its workspace.
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
		return nil, w.NotReady()
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
	err = c.callGuest(ctx, w.Sandbox, http.MethodGet, pathProcesses, nil, nil, answer{boundProcesses, &out})
	return out.Processes, err
}
