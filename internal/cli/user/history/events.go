// Package history has the commands that show what has happened: events, operations and usage.
package history

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewEventsCommand makes the command "coppice events".
func NewEventsCommand(a *cli.App) *cobra.Command {
	var f coppice.EventFilter
	var follow bool
	var in string
	c := &cobra.Command{
		Use:   "events",
		Short: "Show events: changes of state and ends of operations",
		Long: `Show the events of the project: every change of state of a workspace or a checkpoint and every end of an operation. The list begins with the
oldest event that is kept, or with --follow now, and continues across a restart of the server. With --json, it has one object per line.`,
		Example: "  coppice events\n  coppice events --follow --type workspace.ready --type operation\n  coppice events --follow --after 4711 --json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			if f.Tree != "" {
				cp, err := find.Checkpoint(c.Context(), client, f.Tree)
				if err != nil {
					return err
				}
				f.Tree = cp.ID
			}
			if in != "" {
				ws, err := find.Workspace(c.Context(), client, in)
				if err != nil {
					return err
				}
				f.WorkspaceID = ws.ID
			}
			f.Present = !follow
			if f.After == "" && !follow {
				f.After = "0"
			}
			for e, err := range client.Events(c.Context(), f) {
				if err == nil {
					err = printEvent(a, e)
				}
				if err != nil {
					return err
				}
			}
			return nil
		},
	}
	flags := c.Flags()
	flags.BoolVarP(&follow, "follow", "f", false, "continue until Ctrl-C")
	flags.StringVar(&f.After, "after", "", "begin after the event with this `id`; 0 begins with the oldest one that is kept")
	flags.StringVar(&f.Tree, "tree", "", "only events of the tree of this `checkpoint`")
	flags.StringVar(&in, "workspace", "", "only events of this `workspace`")
	flags.StringArrayVar(&f.Types, "type", nil, "only events of this `type`, such as workspace.ready or checkpoint; may be repeated")
	return c
}

// printEvent prints one line.
func printEvent(a *cli.App, e coppice.Event) error {
	if a.JSON {
		return foreign.EncodeJSON(a.Stdout, e, "")
	}
	var about []string
	add := func(name, value string) {
		if value != "" {
			about = append(about, name+" "+foreign.Visible(value))
		}
	}
	if e.WorkspaceID != "" {
		add("workspace", render.Short(e.WorkspaceID))
	}
	if e.CheckpointID != "" {
		add("checkpoint", render.Short(e.CheckpointID))
	}
	if e.OperationID != "" {
		add("operation", render.Short(e.OperationID))
	}
	add("name", e.Data.Name)
	add("kind", e.Data.Kind)
	add("from", e.Data.From)
	add("code", e.Data.Code)
	_, err := fmt.Fprintf(a.Stdout, "%8s  %s  %-24s %s\n", foreign.Visible(e.ID), e.CreatedAt.Local().Format(time.TimeOnly), foreign.Visible(e.Type), foreign.Visible(strings.Join(about, "  ")))
	return err
}
