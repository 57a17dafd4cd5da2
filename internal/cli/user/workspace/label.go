package workspace

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newRenameCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "rename WORKSPACE NEW",
		Short:   "Give a workspace another name; the host name inside stays",
		Example: "  coppice ws rename demo release",
		Args:    cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			return patch(a, c, args[0], coppice.PatchWorkspaceRequest{Name: args[1]}, func(w io.Writer, ws coppice.Workspace) error {
				_, err := fmt.Fprintf(w, "%s is now called %s\n", render.Short(ws.ID), ws.Name)
				return err
			})
		},
	}
}

func newLabelCommand(a *cli.App) *cobra.Command {
	var version int64
	c := &cobra.Command{
		Use:   "label WORKSPACE KEY=VALUE... [KEY-...]",
		Short: "Set labels of a workspace, or remove them with KEY-",
		Long: `Set labels of a workspace, or remove them with KEY-. 'coppice ws ls -l' and 'coppice ws rm -l' choose workspaces by their labels.

With --version, the change is made only if that is still the workspace's version.`,
		Example: "  coppice ws label demo team=blue\n  coppice ws label demo team-",
		Args:    cobra.MinimumNArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			labels, err := argument.Labels(args[1:])
			if err != nil {
				return err
			}
			return patch(a, c, args[0], coppice.PatchWorkspaceRequest{Version: version, Labels: labels}, func(w io.Writer, ws coppice.Workspace) error {
				_, err := fmt.Fprintf(w, "%s, version %d: %s\n", ws.Name, ws.Version, render.Dash(render.Pairs(ws.Labels)))
				return err
			})
		},
	}
	c.Flags().Int64Var(&version, "version", 0, "compare-and-set against this `version`")
	return c
}

// patch changes a workspace and prints it as it is then.
func patch(a *cli.App, c *cobra.Command, ref string, req coppice.PatchWorkspaceRequest, human func(io.Writer, coppice.Workspace) error) error {
	client, err := a.Client()
	if err != nil {
		return err
	}
	ws, err := find.Workspace(c.Context(), client, ref)
	if err != nil {
		return err
	}
	if ws, err = client.PatchWorkspace(c.Context(), ws.ID, req); err != nil {
		return err
	}
	return a.Print(ws, func(w io.Writer) error { return human(w, ws) })
}
