package server

import (
	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/daemon"
)

// NewEgressCommand makes the command of the egress process. A runner starts it, not a user.
func NewEgressCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "egress",
		Short: "Proxy the outgoing traffic of a host's sandboxes; a runner starts this command",
		Long: `Proxy the outgoing traffic of a host's sandboxes, as far as their rules allow it. A runner starts this process and configures it over its
standard input. The process goes on when the runner ends. It has no port: its runner reaches it by a socket file, and sandboxes reach it by
sockets in their own networks.

The process gives up root before it serves. It keeps the records of flows in the runner's data directory until the controller has them.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := newLogger(a.Stderr, "info", autoFormat)
			if err != nil {
				return err
			}
			return daemon.RunEgress(cmd.Context(), cmd.InOrStdin(), log)
		},
	}
}
