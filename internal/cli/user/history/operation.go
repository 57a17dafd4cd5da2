package history

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewOperationCommand makes the command "coppice op".
func NewOperationCommand(a *cli.App) *cobra.Command {
	c := &cobra.Command{Use: "op", Aliases: []string{"operation"}, Short: "List, show and cancel operations"}
	var wait bool
	show := &cobra.Command{
		Use:     "show OPERATION",
		Aliases: []string{"get"},
		Short:   "Show an operation",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			get := client.Operation
			if wait {
				get = client.WaitOperation
			}
			done := a.Working(c.Context(), "waiting")
			op, err := get(c.Context(), args[0])
			done()
			if err != nil {
				return err
			}
			return a.Print(op, func(w io.Writer) error { return printOperation(w, op) })
		},
	}
	show.Flags().BoolVar(&wait, "wait", false, "wait for its end")
	c.AddCommand(newListOperationsCommand(a), show, newCancelCommand(a))
	return c
}

func printOperation(w io.Writer, op coppice.Operation) error {
	problem := ""
	if op.Problem != nil {
		problem = op.Problem.Message + " (" + op.Problem.Code + ")"
	}
	made := fmt.Sprint(len(op.WorkspaceIDs))
	if len(op.WorkspaceIDs) == 0 {
		made = ""
	}
	return render.Facts(w,
		"id", op.ID, "kind", string(op.Kind), "state", string(op.State), "step", op.Step, "problem", problem,
		"workspace", op.WorkspaceID, "checkpoint", op.CheckpointID, "workspaces made", made, "timings", render.Timings(op.Timings),
		"created", render.Moment(op.CreatedAt), "started", render.Moment(op.StartedAt), "ended", render.Moment(op.EndedAt),
	)
}
