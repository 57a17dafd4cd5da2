package session

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewCommand makes the command "coppice session".
func NewCommand(a *cli.App) *cobra.Command {
	c := &cobra.Command{
		Use:   "session",
		Short: "List and end the programs that run in a workspace",
		Long: `List and end the programs that run in a workspace. SESSION is an id or the end of an id. Their output is in 'coppice ws logs', and 'coppice ws shell
--session' attaches to one that has a terminal.`,
	}
	c.AddCommand(newListCommand(a), newKillCommand(a))
	return c
}

func newListCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "ls WORKSPACE",
		Aliases: []string{"list"},
		Short:   "List the sessions of a workspace, newest first",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			_, _, sessions, err := sessionsIn(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			return a.Print(sessions, func(w io.Writer) error { return printSessions(w, time.Now(), sessions) })
		},
	}
}

// sessionsIn finds a workspace and lists its sessions, newest first.
func sessionsIn(ctx context.Context, a *cli.App, workspace string) (*coppice.Client, coppice.Workspace, []coppice.Session, error) {
	client, err := a.Client()
	if err != nil {
		return nil, coppice.Workspace{}, nil, err
	}
	ws, err := find.Workspace(ctx, client, workspace)
	if err != nil {
		return nil, ws, nil, err
	}
	sessions, err := sessionsOf(ctx, client, ws)
	return client, ws, sessions, err
}

func newKillCommand(a *cli.App) *cobra.Command {
	var signal, target string
	c := &cobra.Command{
		Use:   "kill WORKSPACE SESSION",
		Short: "Send a signal to processes of a session",
		Long: `Send a signal to processes of a session.

The targets are: foreground, what is in the foreground of the terminal, or without a terminal the process group; process, the program that was
started; group, its process group; session, all that have not made a session of their own.`,
		Example: "  coppice session kill demo 9r4w6xcv\n  coppice session kill demo 9r4w6xcv --signal KILL --target group",
		Args:    cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			client, ws, sessions, err := sessionsIn(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			session, err := chooseSession(ws, sessions, args[1:])
			if err != nil {
				return err
			}
			name := strings.ToUpper(signal)
			if !strings.HasPrefix(name, "SIG") {
				name = "SIG" + name
			}
			if err := client.SignalTarget(c.Context(), session.ID, name, coppice.SignalRequestTarget(target)); err != nil {
				return err
			}
			return a.Print(map[string]string{"session_id": session.ID, "signal": name}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s was sent %s\n", render.Short(session.ID), name)
				return err
			})
		},
	}
	c.Flags().StringVarP(&signal, "signal", "s", "TERM", "`signal` by name, such as TERM, INT, HUP or KILL")
	c.Flags().StringVar(&target, "target", "", "which `processes`: foreground (default), process, group or session")
	return c
}
