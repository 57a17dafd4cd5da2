// Command coppice is all of Coppice in one binary: the servers (dev, …), the commands for the
// operator of a host (doctor, image) and the client of the public API.
//
// To add a command, write newXCommand(a *app) *cobra.Command in its own file and add it to
// commands.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

// commands lists the constructors of the subcommands.
var commands = []func(*app) *cobra.Command{
	wsCommand,
	ckptCommand,
	newForkCommand,
	newGrantCommand,
	newRestoreCommand,
	newOpCommand,
	newEventsCommand,
	newProjectCommand,
	newKeyCommand,
	newAuditCommand,
	newAttestCommand,
	newAuthorityCommand,
	newImageCommand,
	newDoctorCommand,
	newDevCommand,
	newControllerCommand,
	newMigrateCommand,
	newRunnerCommand,
	newPagerCommand,
	newEgressCommand,
	newRunnerTokenCommand,
	newRunnerTrashCommand,
	newStoreCommand,
	newFleetCommand,
}

func main() {
	daemon.EnterConfined()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	a := &app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv}
	status := run(ctx, a, os.Args[1:])
	stop()
	os.Exit(status)
}

// run executes a command line and returns the exit status.
func run(ctx context.Context, a *app, args []string) int {
	if err := failpoint.ArmList(a.getenv("COPPICE_FAILPOINTS")); err != nil {
		return a.report(misuse(err))
	}
	return a.run(ctx, args, commands...)
}

// wsCommand joins the commands whose first argument is a workspace.
func wsCommand(a *app) *cobra.Command {
	c := newWSCommand(a)
	c.AddCommand(
		newWSExecCommand(a), newWSShellCommand(a), newWSLogsCommand(a),
		newWSUsageCommand(a), newWSNetworkCommand(a), newWSEgressCommand(a), newWSAttestCommand(a),
	)
	return c
}

// ckptCommand joins the commands whose first argument is a checkpoint.
func ckptCommand(a *app) *cobra.Command {
	c := newCkptCommand(a)
	c.AddCommand(newCkptEffectsCommand(a), newCkptUsageCommand(a))
	return c
}
