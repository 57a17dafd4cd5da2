package server

import (
	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/daemon"
)

// NewPagerCommand makes the command of the pager. A runner starts it, not a user.
func NewPagerCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:    "pager",
		Short:  "Serve memory that is still being fetched to this host's VMs; a runner starts this command",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := newLogger(a.Stderr, "info", autoFormat)
			if err != nil {
				return err
			}
			return daemon.RunPager(cmd.Context(), cmd.InOrStdin(), log)
		},
	}
}
