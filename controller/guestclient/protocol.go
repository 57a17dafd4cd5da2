package guestclient

import (
	"slices"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// The parts of the guest agent's messages that the controller passes on. guestagent/guestapi defines them; a test compares the two.
// Everything in them comes from the guest and is untrusted: it is bounded, typed and shown, never believed.
type (
	// Session is an exec session as the agent holds it.
	Session struct {
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

	mark struct {
		Mark string `json:"mark"`
	}

	// List are the sessions of a guest.
	List struct {
		Sessions []Session `json:"sessions"`
	}

	execRequest struct {
		ID core.SessionID `json:"id"`
		ExecRequest
	}
	processes struct {
		Processes []Process `json:"processes"`
	}
	signal struct {
		Signal string `json:"signal"`
	}
	size struct {
		Cols uint16 `json:"cols"`
		Rows uint16 `json:"rows"`
	}
)

// Exited is the State of a session after its program has ended.
const Exited = "exited"

// WaitSlice is the longest time of one wait call: an idle connection is never older.
const WaitSlice = 20 * time.Second

// CodeSessionExists is a code of the agent.
const CodeSessionExists core.Code = "SESSION_EXISTS"

// IDs are the well-formed ids of a list of sessions, each once.
func (g List) IDs() []core.SessionID {
	seen := make(map[core.SessionID]bool, len(g.Sessions))
	ids := make([]core.SessionID, 0, len(g.Sessions))
	for _, s := range g.Sessions {
		if _, err := core.ParseID[core.SessionID](string(s.ID)); err == nil && !seen[s.ID] {
			seen[s.ID] = true
			ids = append(ids, s.ID)
		}
	}
	return ids
}

// Running reports whether a session's program has not ended.
func (g List) Running() bool {
	return slices.ContainsFunc(g.Sessions, func(s Session) bool { return s.State != Exited })
}
