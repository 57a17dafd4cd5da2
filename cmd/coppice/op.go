package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newOpCommand(a *app) *cobra.Command {
	c := &cobra.Command{Use: "op", Aliases: []string{"operation"}, Short: "Show operations"}
	var wait bool
	show := &cobra.Command{
		Use:     "show OPERATION",
		Aliases: []string{"get"},
		Short:   "Show an operation",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			get := client.Operation
			if wait {
				get = client.WaitOperation
			}
			done := a.working(c.Context(), "waiting")
			op, err := get(c.Context(), args[0])
			done()
			if err != nil {
				return err
			}
			return a.print(op, func(w io.Writer) error { return printOperation(w, op) })
		},
	}
	show.Flags().BoolVar(&wait, "wait", false, "wait for its end")
	c.AddCommand(show)
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
	return facts(w,
		"id", op.ID, "kind", string(op.Kind), "state", string(op.State), "step", op.Step, "problem", problem,
		"workspace", op.WorkspaceID, "checkpoint", op.CheckpointID, "workspaces made", made, "timings", timings(op.Timings),
		"created", moment(op.CreatedAt), "started", moment(op.StartedAt), "ended", moment(op.EndedAt),
	)
}
