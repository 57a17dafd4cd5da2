package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// loginShell starts the best shell that the image has.
const loginShell = `for s in "$SHELL" /bin/bash /bin/sh; do if [ -x "$s" ]; then exec "$s" -l; fi; done`

func newWSShellCommand(a *app) *cobra.Command {
	var flags execFlags
	var session string
	c := &cobra.Command{
		Use:   "shell WORKSPACE [--] [COMMAND [ARGUMENT...]]",
		Short: "Open a terminal in a workspace",
		Long: `Open a terminal in a workspace: a login shell, or the given program.

All keys go to the program, including Ctrl-C, and so do changes of the window's size. The program's exit status becomes that of this command.
If the connection is lost, for example at a restart of the controller, the command connects again and continues where it broke off; Ctrl-C
gives up. At the beginning of a line, "~." leaves the session and "~~" types a tilde; --no-escape passes both on. If this terminal closes,
the session goes on: attach to it again with --session.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			ws, err := workspace(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			if session != "" {
				if len(args) > 1 {
					return usageError{errors.New("--session attaches to a program that runs; it takes no COMMAND")}
				}
				return a.reattach(c.Context(), client, ws, session)
			}
			command := commandOf(args)
			if len(command) == 0 {
				command = []string{"/bin/sh", "-c", loginShell}
			}
			req, err := flags.request(command)
			if err != nil {
				return err
			}
			return a.shell(c.Context(), client, ws, req)
		},
	}
	c.Flags().SetInterspersed(false)
	c.Flags().BoolVar(&a.noEscape, "no-escape", false, "pass tildes on like any other key")
	c.Flags().StringVar(&session, "session", "", "attach to this `session` instead of starting one")
	flags.add(c)
	return c
}

// shell starts a program on a terminal and connects this one to it.
func (a *app) shell(ctx context.Context, client *coppice.Client, ws coppice.Workspace, req coppice.ExecRequest) error {
	in, out, err := a.terminals()
	if err != nil {
		return err
	}
	req.PTY, req.StdinOpen = true, true
	if req.Cols, req.Rows, err = term.GetSize(out); err != nil {
		return err
	}
	if name := a.getenv("TERM"); name != "" && req.Env["TERM"] == "" {
		if req.Env == nil {
			req.Env = coppice.Env{}
		}
		req.Env["TERM"] = name
	}
	session, err := client.StartSession(ctx, ws.ID, req)
	if err != nil {
		return a.notStarted(err)
	}
	return a.attach(ctx, client, session, in, out)
}

func (a *app) reattach(ctx context.Context, client *coppice.Client, ws coppice.Workspace, ref string) error {
	in, out, err := a.terminals()
	if err != nil {
		return err
	}
	sessions, err := sessionsOf(ctx, client, ws)
	if err != nil {
		return err
	}
	session, err := chooseSession(ws, sessions, []string{ref})
	if err != nil {
		return err
	}
	return a.attach(ctx, client, session, in, out)
}

func (a *app) terminals() (in, out int, err error) {
	in, okIn := terminal(a.stdin)
	out, okOut := terminal(a.stdout)
	if !okIn || !okOut {
		return 0, 0, usageError{errors.New("standard input and output must both be a terminal; to run a program without one, use coppice ws exec")}
	}
	return in, out, nil
}
