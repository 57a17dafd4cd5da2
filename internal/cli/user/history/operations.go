package history

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newListOperationsCommand(a *cli.App) *cobra.Command {
	var everything, quiet bool
	var workspace string
	var limit int
	c := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List operations that have not ended, newest first",
		Example: "  coppice op ls\n  coppice op ls --all --workspace demo",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if limit < 1 {
				return exit.Misuse(fmt.Errorf("--limit %d is not a positive number", limit))
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			filter := coppice.OperationFilter{}
			if !everything {
				filter.States = []coppice.OperationState{coppice.OperationPending, coppice.OperationRunning}
			}
			if workspace != "" {
				ws, err := find.Workspace(c.Context(), client, workspace)
				if err != nil {
					return err
				}
				filter.WorkspaceID = ws.ID
			}
			list := []coppice.Operation{}
			for op, err := range client.Operations(c.Context(), filter) {
				if err != nil {
					return err
				}
				if list = append(list, op); len(list) == limit {
					break
				}
			}
			return a.Print(list, func(w io.Writer) error {
				if quiet {
					for _, op := range list {
						fmt.Fprintln(w, op.ID)
					}
					return nil
				}
				return printOperations(w, time.Now(), list, everything)
			})
		},
	}
	f := c.Flags()
	f.BoolVarP(&everything, "all", "a", false, "also operations that have ended")
	f.StringVarP(&workspace, "workspace", "w", "", "only operations on this `workspace`")
	f.IntVarP(&limit, "limit", "n", 100, "at most so `many`")
	f.BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	return c
}

func printOperations(w io.Writer, now time.Time, list []coppice.Operation, everything bool) error {
	if len(list) == 0 {
		text := "No operations."
		if !everything {
			text = "No operation is under way. Show those that have ended: coppice op ls --all"
		}
		_, err := fmt.Fprintln(w, text)
		return err
	}
	rows := make([][]string, 0, len(list))
	for _, op := range list {
		state, took := string(op.State), ""
		switch {
		case op.Problem != nil:
			state = op.Problem.Code
		case !op.Done() && op.Step != "":
			state += " " + op.Step
		}
		switch {
		case !op.CancelRequestedAt.IsZero() && !op.Done():
			state += " (canceling)"
		}
		if !op.EndedAt.IsZero() {
			took = render.Milliseconds(float64(op.EndedAt.Sub(op.CreatedAt).Microseconds()) / 1000)
		}
		made := ""
		if n := len(op.WorkspaceIDs); n > 0 {
			made = fmt.Sprint(n)
		}
		rows = append(rows, []string{
			op.ID, string(op.Kind), state, render.Short(cmp.Or(op.WorkspaceID, op.CheckpointID)), made, took, render.Age(now, op.CreatedAt),
		})
	}
	return render.Table(w, "OPERATION KIND STATE ON MAKES TOOK AGE", rows)
}

func newCancelCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "cancel OPERATION...",
		Short: "Cancel operations that make workspaces",
		Long: `Cancel operations that make workspaces, and wait until what they had begun is undone. A fork of a running workspace is canceled after its
capture: its checkpoint stays. An operation that has ended already stays as it is.`,
		Example: "  coppice op ls\n  coppice op cancel op_06h23pjzw358e1dsh3eef37yt8",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			ended := []coppice.Operation{}
			done := a.Working(c.Context(), "canceling")
			failed := argument.Each(args, func(id string) error {
				if !strings.HasPrefix(id, "op_") {
					return core.Errorf(core.Invalid, core.CodeInvalidID, "%q is not the id of an operation; list them with coppice op ls", core.Clip(id))
				}
				op, err := client.CancelOperation(c.Context(), id)
				if err == nil {
					ended = append(ended, op)
				}
				return err
			})
			done()
			if err := a.Print(ended, func(w io.Writer) error { return printCanceled(w, ended) }); err != nil {
				return err
			}
			return failed
		},
	}
}

func printCanceled(w io.Writer, list []coppice.Operation) error {
	for _, op := range list {
		text := "had " + string(op.State) + " already"
		if op.Problem != nil && op.Problem.Code == string(coppice.CodeOperationCanceled) {
			text = "is canceled"
		}
		if _, err := fmt.Fprintf(w, "%s %s\n", op.ID, text); err != nil {
			return err
		}
	}
	return nil
}
