// Command coppice is all of Coppice in one binary: the servers (dev, …), the commands for the
// operator of a host (doctor, image) and the client of the public API. This package lists the
// commands; they are in the packages below internal/cli.
//
// To add a command, write NewXCommand(a *cli.App) *cobra.Command in the package of its subject and
// add it to commands.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/operator/fleet"
	"github.com/coppice-dev/coppice/internal/cli/operator/host"
	"github.com/coppice-dev/coppice/internal/cli/operator/server"
	"github.com/coppice-dev/coppice/internal/cli/operator/store"
	"github.com/coppice-dev/coppice/internal/cli/user/attestation"
	"github.com/coppice-dev/coppice/internal/cli/user/checkpoint"
	"github.com/coppice-dev/coppice/internal/cli/user/contexts"
	"github.com/coppice-dev/coppice/internal/cli/user/egress"
	"github.com/coppice-dev/coppice/internal/cli/user/grant"
	"github.com/coppice-dev/coppice/internal/cli/user/history"
	"github.com/coppice-dev/coppice/internal/cli/user/image"
	"github.com/coppice-dev/coppice/internal/cli/user/mcp"
	"github.com/coppice-dev/coppice/internal/cli/user/session"
	"github.com/coppice-dev/coppice/internal/cli/user/tenant"
	"github.com/coppice-dev/coppice/internal/cli/user/version"
	"github.com/coppice-dev/coppice/internal/cli/user/workspace"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

// commands lists the constructors of the subcommands.
var commands = []func(*cli.App) *cobra.Command{
	wsCommand,
	ckptCommand,
	workspace.NewForkCommand,
	grant.NewCommand,
	workspace.NewRestoreCommand,
	workspace.NewStepCommand,
	contexts.NewCommand,
	session.NewCommand,
	history.NewOperationCommand,
	history.NewEventsCommand,
	tenant.NewProjectCommand,
	tenant.NewKeyCommand,
	tenant.NewAuditCommand,
	attestation.NewCommand,
	attestation.NewAuthorityCommand,
	mcp.NewCommand,
	imageCommand,
	host.NewDoctorCommand,
	endsAtHangup(server.NewDevCommand),
	endsAtHangup(server.NewControllerCommand),
	server.NewMigrateCommand,
	endsAtHangup(server.NewRunnerCommand),
	endsAtHangup(server.NewPagerCommand),
	endsAtHangup(server.NewEgressCommand),
	fleet.NewTokenCommand,
	host.NewTrashCommand,
	store.NewCommand,
	fleet.NewCommand,
	version.NewCommand,
}

func main() {
	daemon.EnterConfined()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	a := &cli.App{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv}
	status := run(ctx, a, os.Args[1:])
	stop()
	os.Exit(status)
}

// run executes a command line and returns the exit status.
func run(ctx context.Context, a *cli.App, args []string) int {
	if err := failpoint.ArmList(a.Getenv("COPPICE_FAILPOINTS")); err != nil {
		return a.Report(exit.Misuse(err))
	}
	return a.Run(ctx, args, commands...)
}

// ignored says whether this program was started with a signal ignored. A variable for tests, which may run after nohup themselves.
var ignored = signal.Ignored

// endsAtHangup makes a server end in order when its terminal is closed, as at SIGTERM: the VMs would outlive it otherwise. After nohup the
// signal stays ignored. Commands of users keep the usual end: what runs in a workspace goes on.
func endsAtHangup(command func(*cli.App) *cobra.Command) func(*cli.App) *cobra.Command {
	return func(a *cli.App) *cobra.Command {
		c := command(a)
		serve := c.RunE
		c.RunE = func(c *cobra.Command, args []string) error {
			if !ignored(syscall.SIGHUP) {
				ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGHUP)
				defer stop()
				c.SetContext(ctx)
			}
			return serve(c, args)
		}
		return c
	}
}

// wsCommand joins the commands whose first argument is a workspace.
func wsCommand(a *cli.App) *cobra.Command {
	c := workspace.NewCommand(a)
	c.AddCommand(
		session.NewExecCommand(a), session.NewShellCommand(a), session.NewLogsCommand(a),
		history.NewWorkspaceUsageCommand(a), egress.NewRulesCommand(a), egress.NewFlowsCommand(a), attestation.NewWorkspaceCommand(a),
	)
	return c
}

// imageCommand joins the commands about images. Those of this host know no server; a build from a Dockerfile asks one.
func imageCommand(a *cli.App) *cobra.Command {
	c := host.NewImageCommand(a)
	for _, sub := range c.Commands() {
		if sub.Name() == "build" {
			image.ExtendBuild(a, sub)
		}
	}
	return c
}

// ckptCommand joins the commands whose first argument is a checkpoint.
func ckptCommand(a *cli.App) *cobra.Command {
	c := checkpoint.NewCommand(a)
	c.AddCommand(egress.NewEffectsCommand(a), history.NewCheckpointUsageCommand(a))
	return c
}
