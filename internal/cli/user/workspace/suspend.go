package workspace

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newSuspendCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "suspend WORKSPACE...",
		Short: "Checkpoint workspaces and stop them until they are resumed",
		Long: `Checkpoint workspaces and stop them until they are resumed. A suspended workspace takes only disk space. After a resume its programs continue
from the instant of the suspension.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			return eachWorkspace(a, c, args, "suspending", func(ws coppice.Workspace) (coppice.Workspace, error) {
				return client.SuspendWorkspace(c.Context(), ws.ID)
			})
		},
	}
}

func newResumeCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "resume WORKSPACE...",
		Short: "Resume suspended workspaces",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			return eachWorkspace(a, c, args, "resuming", func(ws coppice.Workspace) (coppice.Workspace, error) {
				return client.ResumeWorkspace(c.Context(), ws.ID)
			})
		},
	}
}

// eachWorkspace does something to each of the named workspaces and prints the results.
func eachWorkspace(a *cli.App, c *cobra.Command, refs []string, doing string, do func(coppice.Workspace) (coppice.Workspace, error)) error {
	client, err := a.Client()
	if err != nil {
		return err
	}
	changed := []coppice.Workspace{}
	began := time.Now()
	found, err := find.Workspaces(c.Context(), client, refs)
	if err != nil {
		return err
	}
	failed := argument.EachOf(found, func(ws coppice.Workspace) error {
		done := a.Working(c.Context(), doing+" "+ws.Name)
		name := ws.Name
		ws, err := do(ws)
		done()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		changed = append(changed, ws)
		return nil
	})
	err = a.Print(changed, func(w io.Writer) error {
		for _, ws := range changed {
			fmt.Fprintf(w, "%s (%s) is %s after %.1f s\n", ws.Name, render.Short(ws.ID), ws.State, time.Since(began).Seconds())
		}
		return nil
	})
	return errors.Join(failed, err)
}

func whenIdle(ws coppice.Workspace) string {
	text := ""
	if ws.IdleSeconds > 0 {
		text = fmt.Sprintf("%s after %s", ws.OnIdle, time.Duration(ws.IdleSeconds)*time.Second)
	}
	if ws.AutoResume {
		if text != "" {
			text += ", "
		}
		text += "resumed on use"
	}
	return text
}

// expiry says when the time of a workspace is up, and what becomes of it then.
func expiry(ws coppice.Workspace) string {
	text := render.Moment(ws.ExpiresAt)
	if text != "" && ws.OnTTL == coppice.TTLSuspend {
		text += ", then suspended"
	}
	return text
}
