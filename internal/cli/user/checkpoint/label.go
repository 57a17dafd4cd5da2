package checkpoint

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
		Use:     "rename CHECKPOINT NEW",
		Short:   "Give a checkpoint another name; an empty one removes the name",
		Example: "  coppice ckpt rename 9r4w6xcv before-upgrade\n  coppice ckpt rename before-upgrade ''",
		Args:    cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			return patch(a, c, args[0], coppice.PatchCheckpointRequest{Name: &args[1]}, func(w io.Writer, cp coppice.Checkpoint) error {
				if cp.Name == "" {
					_, err := fmt.Fprintf(w, "%s has no name now\n", render.Short(cp.ID))
					return err
				}
				_, err := fmt.Fprintf(w, "%s is now called %s\n", render.Short(cp.ID), cp.Name)
				return err
			})
		},
	}
}

func newLabelCommand(a *cli.App) *cobra.Command {
	var version int64
	c := &cobra.Command{
		Use:   "label CHECKPOINT KEY=VALUE... [KEY-...]",
		Short: "Set labels of a checkpoint, or remove them with KEY-",
		Long: `Set labels of a checkpoint, or remove them with KEY-. 'coppice ckpt ls -l' chooses checkpoints by their labels.

With --version, the change is made only if that is still the checkpoint's version.`,
		Example: "  coppice ckpt label before-upgrade keep=yes\n  coppice ckpt label before-upgrade keep-",
		Args:    cobra.MinimumNArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			labels, err := argument.Labels(args[1:])
			if err != nil {
				return err
			}
			return patch(a, c, args[0], coppice.PatchCheckpointRequest{Version: version, Labels: labels}, func(w io.Writer, cp coppice.Checkpoint) error {
				_, err := fmt.Fprintf(w, "version %d: %s\n", cp.Version, render.Dash(render.Pairs(cp.Labels)))
				return err
			})
		},
	}
	c.Flags().Int64Var(&version, "version", 0, "compare-and-set against this `version`")
	return c
}

// patch changes a checkpoint and prints it as it is then.
func patch(a *cli.App, c *cobra.Command, ref string, req coppice.PatchCheckpointRequest, human func(io.Writer, coppice.Checkpoint) error) error {
	client, cp, err := find.ClientAndCheckpoint(c.Context(), a, ref)
	if err != nil {
		return err
	}
	if cp, err = client.PatchCheckpoint(c.Context(), cp.ID, req); err != nil {
		return err
	}
	return a.Print(cp, func(w io.Writer) error { return human(w, cp) })
}
