package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/cli/terminal"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewLogsCommand makes the command "coppice ws logs".
func NewLogsCommand(a *cli.App) *cobra.Command {
	var follow, console, list, raw bool
	c := &cobra.Command{
		Use:   "logs WORKSPACE [SESSION]",
		Short: "Print the output of a session, by default the newest, or the machine's console",
		Long: `Print the output of a session, by default the newest, or the machine's console.

A pipe or a file gets the bytes unchanged. The output comes from a guest, so a terminal shows control characters and escape sequences as
text, such as \x1b. --raw passes them on.`,
		Example: `  coppice ws logs demo --list
  coppice ws logs -f demo
  coppice ws logs --console demo`,
		Args: cobra.RangeArgs(1, 2),
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
			if console {
				return printConsole(ctx, a, client, ws, raw)
			}
			sessions, err := sessionsOf(ctx, client, ws)
			if err != nil {
				return err
			}
			if list {
				return a.Print(sessions, func(w io.Writer) error { return printSessions(w, time.Now(), sessions) })
			}
			session, err := chooseSession(ws, sessions, args[1:])
			if err != nil {
				return err
			}
			return printLogs(ctx, a, client, session, follow, raw)
		},
	}
	f := c.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "follow the output until the session ends, and pass on its exit status")
	f.BoolVar(&console, "console", false, "print the serial console of the machine instead")
	f.BoolVar(&list, "list", false, "list the sessions instead")
	f.BoolVar(&raw, "raw", false, "pass control characters and escape sequences on to a terminal")
	c.MarkFlagsMutuallyExclusive("console", "list", "follow")
	return c
}

// printLogs prints the output of a session, and follows it if asked. On a terminal, control characters are shown as text and have no effect,
// unless raw.
func printLogs(ctx context.Context, a *cli.App, client *coppice.Client, session coppice.Session, follow, raw bool) (err error) {
	shown := *a
	var endOut, endErr func() error
	shown.Stdout, endOut = terminal.ForGuest(a.Stdout, raw)
	shown.Stderr, endErr = terminal.ForGuest(a.Stderr, raw)
	defer func() { err = errors.Join(err, endOut(), endErr()) }()
	return printOutput(ctx, &shown, client, session, follow)
}

func printOutput(ctx context.Context, a *cli.App, client *coppice.Client, session coppice.Session, follow bool) error {
	for stream, dropped := range map[string]int64{coppice.Stdout: session.StdoutFirst, coppice.Stderr: session.StderrFirst} {
		if dropped > 0 {
			fmt.Fprintf(a.Stderr, "coppice: the first %s of %s are no longer kept\n", render.Size(dropped), stream)
		}
	}
	if follow {
		session, err := followOutput(ctx, a, client, session)
		if err != nil {
			return err
		}
		return exit.PassOn(*session.ExitCode)
	}
	for stream, w := range map[string]io.Writer{coppice.Stdout: a.Stdout, coppice.Stderr: a.Stderr} {
		if session.PTY && stream == coppice.Stderr {
			continue
		}
		o, err := client.SessionOutput(ctx, session.ID, stream, 0, false)
		if err != nil {
			return err
		}
		_, err = io.Copy(w, o)
		if err := errors.Join(err, o.Close()); err != nil {
			return err
		}
	}
	return nil
}

// printConsole prints the tail of the machine's console. On a terminal, its control characters are shown, not obeyed.
func printConsole(ctx context.Context, a *cli.App, client *coppice.Client, ws coppice.Workspace, raw bool) error {
	b, err := client.Console(ctx, ws.ID)
	if errors.Is(err, coppice.CodeWorkspaceNotReady) && ws.Failure != nil {
		if _, last, ok := strings.Cut(ws.Failure.Message, "\nconsole: "); ok { // what is left of it
			fmt.Fprintf(a.Stderr, "coppice: the machine of %s has ended (%s); these are lines of its console that were kept\n", foreign.Visible(ws.Name), ws.State)
			b, err = []byte(last+"\n"), nil
		}
	}
	if err != nil {
		return err
	}
	if !a.JSON {
		w, end := terminal.ForGuest(a.Stdout, raw)
		_, err := w.Write(b)
		return errors.Join(err, end())
	}
	return a.Print(map[string]string{"console": string(b)}, func(io.Writer) error {
		return nil
	})
}
