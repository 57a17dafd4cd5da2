// Package session has the commands that run programs in workspaces and show their output.
package session

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// sessionsOf lists the sessions of a workspace, the one that was started last first: a fork has its parent's, whose ids
// say when the fork first told of them.
func sessionsOf(ctx context.Context, client *coppice.Client, ws coppice.Workspace) ([]coppice.Session, error) {
	sessions, err := coppice.Collect(client.Sessions(ctx, ws.ID))
	slices.SortStableFunc(sessions, func(a, b coppice.Session) int { return b.StartedAt.Compare(a.StartedAt) })
	return sessions, err
}

// chooseSession finds the session that a person means among those of a workspace: the newest if none is named.
func chooseSession(ws coppice.Workspace, sessions []coppice.Session, ref []string) (coppice.Session, error) {
	if len(ref) == 0 {
		if len(sessions) == 0 {
			return coppice.Session{}, core.Errorf(core.NotFound, core.CodeSessionNotFound, "workspace %s has no sessions; show its console with coppice ws logs --console", ws.Name)
		}
		return sessions[0], nil
	}
	var found []coppice.Session
	for _, s := range sessions {
		if s.ID == ref[0] {
			return s, nil
		}
		if len(ref[0]) >= 4 && strings.HasSuffix(s.ID, ref[0]) {
			found = append(found, s)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return coppice.Session{}, core.Errorf(core.NotFound, core.CodeSessionNotFound, "workspace %s has no session %q; list the sessions with coppice ws logs --list", ws.Name, core.Clip(ref[0]))
	}
	return coppice.Session{}, core.Errorf(core.Invalid, core.CodeInvalidID, "%q names %d sessions; give more of the id", core.Clip(ref[0]), len(found))
}

func printSessions(w io.Writer, now time.Time, list []coppice.Session) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "No sessions.")
		return err
	}
	rows := make([][]string, 0, len(list))
	for _, s := range list {
		how := ""
		if s.ExitCode != nil {
			how = fmt.Sprint(*s.ExitCode)
		}
		if s.TimedOut {
			how += " (timed out)"
		}
		rows = append(rows, []string{render.Short(s.ID), string(s.State), how, fmt.Sprint(s.PID), render.Size(s.StdoutBytes), render.Size(s.StderrBytes), render.Age(now, s.StartedAt), commandLine(s.Command)})
	}
	return render.Table(w, "SESSION STATE EXIT PID STDOUT STDERR AGE COMMAND", rows)
}

// commandLine shows a command so that it fits a line.
func commandLine(command []string) string {
	const limit = 44 // beside the other columns in a terminal of 100
	words := make([]string, 0, len(command))
	for _, w := range command {
		if w == "" || strings.ContainsAny(w, " \t\n'\"\\$`*?;&|<>()") {
			w = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
		}
		words = append(words, w)
	}
	line := []rune(strings.Join(words, " "))
	if len(line) > limit {
		return string(line[:limit-1]) + "…"
	}
	return string(line)
}
