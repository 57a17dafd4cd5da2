package session

import (
	"io"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/find"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewSignalCommand makes the command "coppice ws signal".
func NewSignalCommand(a *cli.App) *cobra.Command {
	var target string
	c := &cobra.Command{
		Use:   "signal WORKSPACE SIGNAL [SESSION]",
		Short: "Send a signal to processes of a session, by default the newest",
		Long: `Send a signal to processes of a session, by default the newest.

The targets are: foreground, what is in the foreground of the terminal, or without a terminal the process group; process, the program that was
started; group, its process group; session, all that have not made a session of their own.`,
		Example: "  coppice ws signal demo TERM\n  coppice ws signal demo INT --target group",
		Args:    cobra.RangeArgs(2, 3),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			ctx := c.Context()
			ws, err := find.Workspace(ctx, client, args[0])
			if err != nil {
				return err
			}
			sessions, err := sessionsOf(ctx, client, ws)
			if err != nil {
				return err
			}
			session, err := chooseSession(ws, sessions, args[2:])
			if err != nil {
				return err
			}
			if err := client.SignalTarget(ctx, session.ID, args[1], coppice.SignalRequestTarget(target)); err != nil {
				return err
			}
			return a.Print(map[string]string{"session_id": session.ID, "signal": args[1]}, func(io.Writer) error { return nil })
		},
	}
	c.Flags().StringVar(&target, "target", "", "which `processes`: foreground (default), process, group or session")
	return c
}
