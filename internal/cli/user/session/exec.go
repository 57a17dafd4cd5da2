package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// execFlags say how a program is run.
type execFlags struct {
	cwd, user string
	env       []string
	timeout   time.Duration
}

func (e *execFlags) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVarP(&e.cwd, "cwd", "C", "", "working `directory` (default: the image's WORKDIR, else /workspace if it exists, else the home directory)")
	f.StringArrayVarP(&e.env, "env", "e", nil, "environment, `KEY=VALUE`; may be repeated")
	f.StringVarP(&e.user, "user", "u", "", "`user` name or id, optionally with :group (default: the image's USER, else root)")
	f.DurationVar(&e.timeout, "timeout", 0, "kill the program after this `duration`; 0: never")
}

func (e *execFlags) request(command []string) (coppice.ExecRequest, error) {
	env, err := argument.KeyValues("--env", e.env)
	if err == nil && e.timeout < 0 {
		err = exit.Misuse(fmt.Errorf("--timeout %s is negative", e.timeout))
	}
	return coppice.ExecRequest{Command: command, Cwd: e.cwd, Env: env, User: e.user, TimeoutMS: e.timeout.Milliseconds()}, err
}

// commandOf returns the command after the workspace. Flags stand before the workspace or after it, until "--" or the first word that is
// not a flag: what follows is the command's. help says that the user asked for help.
func commandOf(c *cobra.Command, args []string) (command []string, help bool, err error) {
	if err := c.ParseFlags(args[1:]); err != nil {
		return nil, false, exit.Misuse(err)
	}
	help, _ = c.Flags().GetBool("help")
	return c.Flags().Args(), help, nil
}

// NewExecCommand makes the command "coppice ws exec".
func NewExecCommand(a *cli.App) *cobra.Command {
	var flags execFlags
	var interactive, tty, detach bool
	var when string
	c := &cobra.Command{
		Use:   "exec WORKSPACE [flags] [--] COMMAND [ARGUMENT...]",
		Short: "Run a program in a workspace",
		Long: `Run a program in a workspace. There is no shell in between; use sh -c for one. Flags end at "--" or at the first word that is not a flag: what
follows is the program and its arguments.

The command passes the program's output on as it arrives. The program's exit status becomes that of this command: 127 if there is no such
program, 126 if it cannot be run, 124 if it was killed at its timeout. Ctrl-C sends the program SIGINT; a second Ctrl-C leaves it running.
With --json, the command prints the output and the exit status as one object when the program has ended.

With --checkpoint, the command makes a checkpoint of the workspace after the program, in one operation: always, on_change (unless the
machine is unchanged) or on_success (if the exit status is 0). The program is killed after a minute, or after --timeout, which is at most an
hour. It has no input. The last 64 KiB of each stream are printed when the operation has ended. Ctrl-C leaves the operation running.`,
		Example: "  coppice ws exec demo -- uname -a\n  coppice ws exec demo -u nobody -- id\n  coppice ws exec demo -- sh -c 'make test 2>&1 | tail'\n  tar c . | coppice ws exec -i demo -- tar x -C /workspace\n  coppice ws exec demo --checkpoint on_success -- make test",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			command, help, err := commandOf(c, args)
			switch {
			case err != nil:
				return err
			case help:
				return c.Help()
			case len(command) == 0:
				return exit.Misuse(errors.New("no command is given; usage: " + c.UseLine()))
			}
			if detach && (interactive || tty) {
				return exit.Misuse(errors.New("--detach goes with neither --interactive nor --tty"))
			}
			if when != "" && (detach || interactive || tty) {
				return exit.Misuse(errors.New("--checkpoint goes with none of --detach, --interactive and --tty"))
			}
			req, err := flags.request(command)
			if err != nil {
				return err
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			ws, err := find.Workspace(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			switch {
			case when != "":
				return executeThenCheckpoint(c.Context(), a, client, ws, req, coppice.StepWhen(when))
			case detach:
				return startDetached(c.Context(), a, client, ws, req)
			case tty:
				return openShell(c.Context(), a, client, ws, req, false)
			case a.JSON && !interactive:
				return executeJSON(c.Context(), a, client, ws, req)
			}
			return execute(c.Context(), a, client, ws, req, interactive)
		},
	}
	c.Flags().SetInterspersed(false)
	f := c.Flags()
	f.BoolVarP(&interactive, "interactive", "i", false, "pass standard input on to the program")
	f.BoolVarP(&tty, "tty", "t", false, "give the program a terminal, as ws shell does")
	f.BoolVarP(&detach, "detach", "d", false, "return at once and print the session's id; coppice ws logs has its output")
	f.StringVar(&when, "checkpoint", "", "make a checkpoint afterwards: `always`, on_change or on_success")
	flags.add(c)
	return c
}

func startDetached(ctx context.Context, a *cli.App, client *coppice.Client, ws coppice.Workspace, req coppice.ExecRequest) error {
	session, err := client.StartSession(ctx, ws.ID, req)
	if err != nil {
		return notStarted(a, err)
	}
	return a.Print(session, func(w io.Writer) error {
		_, err := fmt.Fprintln(w, session.ID)
		return err
	})
}

func executeJSON(ctx context.Context, a *cli.App, client *coppice.Client, ws coppice.Workspace, req coppice.ExecRequest) error {
	res, err := client.Exec(ctx, ws.ID, req)
	if err != nil {
		return notStarted(a, err)
	}
	if err := a.Print(res, nil); err != nil {
		return err
	}
	return exit.PassOn(res.ExitCode)
}

// executeThenCheckpoint runs a program, and makes a checkpoint of the workspace as one operation with it.
func executeThenCheckpoint(ctx context.Context, a *cli.App, client *coppice.Client, ws coppice.Workspace, req coppice.ExecRequest, when coppice.StepWhen) error {
	done := a.Working(ctx, "the program runs")
	res, err := client.StepWorkspace(ctx, ws.ID, coppice.WorkspaceStepRequest{
		Command: req.Command, Cwd: req.Cwd, Env: req.Env, User: req.User, TimeoutMS: req.TimeoutMS, When: when,
	})
	done()
	if err != nil {
		return notStarted(a, err)
	}
	stdout, stderr, err := res.Output()
	if err == nil && a.JSON {
		err = a.Print(res, nil)
	} else if err == nil {
		_, err1 := a.Stdout.Write(stdout)
		_, err2 := a.Stderr.Write(stderr)
		err = errors.Join(err1, err2)
	}
	switch {
	case err != nil:
		return err
	case res.Problem != nil:
		return &coppice.Error{Code: coppice.Code(res.Problem.Code), Detail: "no checkpoint: " + res.Problem.Message, OperationID: res.OperationID}
	case res.CheckpointID != "":
		fmt.Fprintf(a.Stderr, "coppice: checkpoint %s\n", res.CheckpointID)
	}
	if res.TimedOut {
		return exit.StatusError(exit.TimedOut)
	}
	return exit.PassOn(*res.ExitCode)
}

// execute runs a program with its output passed on, and its input if asked.
func execute(ctx context.Context, a *cli.App, client *coppice.Client, ws coppice.Workspace, req coppice.ExecRequest, interactive bool) error {
	req.StdinOpen = interactive
	session, err := client.StartSession(ctx, ws.ID, req)
	if err != nil {
		return notStarted(a, err)
	}
	if interactive {
		// It ends with the process: a read of standard input cannot be taken back.
		go func() { _ = client.WriteStdin(context.WithoutCancel(ctx), session.ID, a.Stdin, true) }()
	}
	// The first Ctrl-C goes to the program; its output is still followed to the end. The second Ctrl-C ends this command.
	remote, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	go func() {
		select {
		case <-ctx.Done():
		case <-remote.Done():
			return
		}
		again := make(chan os.Signal, 1)
		signal.Notify(again, os.Interrupt, syscall.SIGTERM)
		defer signal.Stop(again)
		fmt.Fprintf(a.Stderr, "coppice: interrupting; press Ctrl-C again to leave session %s running\n", session.ID)
		if err := client.SignalSession(remote, session.ID, "SIGINT"); err != nil {
			cancel(err)
		}
		select {
		case <-again:
			cancel(context.Canceled)
		case <-remote.Done():
		}
	}()
	session, err = followOutput(remote, a, client, session)
	if err != nil {
		return err
	}
	if session.TimedOut {
		fmt.Fprintf(a.Stderr, "coppice: the program was killed at its timeout of %s\n", time.Duration(req.TimeoutMS)*time.Millisecond)
		return exit.StatusError(exit.TimedOut)
	}
	return exit.PassOn(*session.ExitCode)
}

// notStarted reports a program that could not be started. It uses the exit status that a shell would use.
func notStarted(a *cli.App, err error) error {
	for code, status := range map[coppice.Code]int{coppice.CodeCommandNotFound: noCommand, coppice.CodeCommandNotStarted: cannotRun} {
		if errors.Is(err, code) {
			return exit.StatusError(a.ReportAs(err, status))
		}
	}
	return err
}

// The exit statuses of a shell for a program that it cannot run, and for a program that does not exist.
const (
	cannotRun = 126
	noCommand = 127
)

// followOutput copies a session's output until it has ended.
func followOutput(ctx context.Context, a *cli.App, client *coppice.Client, session coppice.Session) (coppice.Session, error) {
	errs := make(chan error, 1)
	go func() {
		if session.PTY {
			errs <- nil
			return
		}
		errs <- client.Follow(ctx, session.ID, coppice.Stderr, session.StderrFirst, a.Stderr)
	}()
	err := client.Follow(ctx, session.ID, coppice.Stdout, session.StdoutFirst, a.Stdout)
	if other := <-errs; err == nil {
		err = other // the two streams end for one reason, which is said once
	}
	if err != nil {
		return session, err
	}
	return client.WaitSession(ctx, session.ID)
}
