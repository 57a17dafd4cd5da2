package session

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/terminal"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// loginShell starts the best shell that the image has.
const loginShell = `for s in "$SHELL" /bin/bash /bin/sh; do if [ -x "$s" ]; then exec "$s" -l; fi; done`

// NewShellCommand makes the command "coppice ws shell".
func NewShellCommand(a *cli.App) *cobra.Command {
	var flags execFlags
	var session string
	var plain bool
	c := &cobra.Command{
		Use:   "shell WORKSPACE [flags] [--] [COMMAND [ARGUMENT...]]",
		Short: "Open a terminal in a workspace",
		Long: `Open a terminal in a workspace: a login shell, or the given program.

All keys go to the program, including Ctrl-C, and so do changes of the window's size. The program's exit status becomes that of this command.
If the connection is lost, for example at a restart of the controller, the command connects again and continues where it broke off; Ctrl-C
gives up. At the beginning of a line, "~." leaves the session and "~~" types a tilde; --no-escape passes both on. If this terminal closes,
the session goes on: attach to it again with --session.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			command, help, err := commandOf(c, args)
			if err != nil {
				return err
			}
			if help {
				return c.Help()
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			ws, err := find.Workspace(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			if session != "" {
				if len(command) > 0 {
					return exit.Misuse(errors.New("--session attaches to a program that runs; it takes no COMMAND"))
				}
				return reattach(c.Context(), a, client, ws, session, plain)
			}
			if len(command) == 0 {
				command = []string{"/bin/sh", "-c", loginShell}
			}
			req, err := flags.request(command)
			if err != nil {
				return err
			}
			return openShell(c.Context(), a, client, ws, req, plain)
		},
	}
	c.Flags().SetInterspersed(false)
	c.Flags().BoolVar(&plain, "no-escape", false, "pass tildes on like any other key")
	c.Flags().StringVar(&session, "session", "", "attach to this `session` instead of starting one")
	flags.add(c)
	return c
}

// openShell starts a program on a terminal and connects this one to it. With plain, no key leaves the session.
func openShell(ctx context.Context, a *cli.App, client *coppice.Client, ws coppice.Workspace, req coppice.ExecRequest, plain bool) error {
	own, err := terminal.Open(a.Stdin, a.Stdout, a.Stderr)
	if err != nil {
		return err
	}
	own.Plain = plain
	req.PTY, req.StdinOpen = true, true
	if req.Cols, req.Rows, err = own.Size(); err != nil {
		return err
	}
	if name := a.Getenv("TERM"); name != "" && req.Env["TERM"] == "" {
		if req.Env == nil {
			req.Env = coppice.Env{}
		}
		req.Env["TERM"] = name
	}
	session, err := client.StartSession(ctx, ws.ID, req)
	if err != nil {
		return notStarted(a, err)
	}
	return own.Attach(ctx, client, session)
}

func reattach(ctx context.Context, a *cli.App, client *coppice.Client, ws coppice.Workspace, ref string, plain bool) error {
	own, err := terminal.Open(a.Stdin, a.Stdout, a.Stderr)
	if err != nil {
		return err
	}
	own.Plain = plain
	sessions, err := sessionsOf(ctx, client, ws)
	if err != nil {
		return err
	}
	session, err := chooseSession(ws, sessions, []string{ref})
	if err != nil {
		return err
	}
	return own.Attach(ctx, client, session)
}
