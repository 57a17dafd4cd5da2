package history

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewWorkspaceUsageCommand makes the command "coppice ws usage".
func NewWorkspaceUsageCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "usage WORKSPACE",
		Short: "Show the usage of a workspace",
		Args:  cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			ws, err := find.Workspace(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			u, err := client.WorkspaceUsage(c.Context(), ws.ID)
			if err != nil {
				return err
			}
			return a.Print(u, func(w io.Writer) error { return printUsage(w, u) })
		},
	}
}

// NewCheckpointUsageCommand makes the command "coppice ckpt usage".
func NewCheckpointUsageCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "usage CHECKPOINT",
		Short: "Show the usage of all descendants of a checkpoint",
		Args:  cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, cp, err := find.ClientAndCheckpoint(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			u, err := client.CheckpointUsage(c.Context(), cp.ID)
			if err != nil {
				return err
			}
			return a.Print(u, func(w io.Writer) error { return printUsage(w, u) })
		},
	}
}

func printUsage(w io.Writer, u coppice.Usage) error {
	return render.Facts(w,
		"workspaces", fmt.Sprint(u.Workspaces), "checkpoints", fmt.Sprint(u.Checkpoints),
		"CPU", fmt.Sprintf("%.1f s", u.CPUSeconds), "memory", fmt.Sprintf("%.1f GiB s", u.GibSeconds), "stored", render.Size(u.StoredBytes),
		"prepared", fmt.Sprintf("%.1f s CPU in vain", u.PreparedCPUSeconds), "sent", render.Size(u.SentBytes), "received", render.Size(u.ReceivedBytes), "sampled", render.Moment(u.SampledAt),
	)
}
