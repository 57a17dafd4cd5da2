package main

import (
	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/daemon"
)

// newEgressCommand is what a runner starts, not a user.
func newEgressCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "egress",
		Short: "Carry what a host's sandboxes send out, as far as they may; a runner starts it",
		Long: `Carry what a host's sandboxes send out, as far as they may. A runner starts this process and tells it on its standard input what to do; it goes on
when the runner ends. It has no port: its runner reaches it by a socket file, and sandboxes by sockets in their own networks.

It gives up root before it serves, and keeps what sandboxes sent in the runner's data directory until the controller has it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := newLogger(a.stderr, "info")
			if err != nil {
				return err
			}
			return daemon.RunEgress(cmd.Context(), cmd.InOrStdin(), log)
		},
	}
}
