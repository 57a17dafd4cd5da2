// Package version has the command that says which build this program is.
package version

import (
	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
)

// NewCommand makes the command "coppice version".
func NewCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show which build this program is",
		Long: `Show which build this program is: the version, the commit and its date, the Go version and the platform. It asks no server.

A release has its tag as its version. Any other build has a name made of the commit, with "+dirty" at its end if there were changes that are
in no commit. A build without the data of the repository is "devel".`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return a.PrintVersion() },
	}
}
