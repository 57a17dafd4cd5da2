// Package egress has the commands that show and change what workspaces reach outside.
package egress

import (
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewFlowsCommand makes the command "coppice ws egress".
func NewFlowsCommand(a *cli.App) *cobra.Command {
	var f coppice.EgressFilter
	var denied bool
	var limit int
	c := &cobra.Command{
		Use:   "egress WORKSPACE",
		Short: "Show what a workspace sent or tried to send",
		Long: `Show what a workspace sent or tried to send through the egress proxy, newest first. For TLS and other protocols only the destination is
recorded. Nothing was sent of a denied flow. A cut flow had begun, and the proxy ended it: what was sent until then was sent. When many flows
are denied within a minute, most share a row: TIMES is their number, TIME is the time of the first one. When a workspace has reached its bound
of rows, its further flows are counted by minute or day and host, shown as "counted".

To show what the workspace may reach, use: coppice ws network WORKSPACE`,
		Example: "  coppice ws egress demo\n  coppice ws egress demo --denied --limit 0 --json",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			ws, err := find.Workspace(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			if denied {
				f.Outcome = coppice.FlowDenied
			}
			list := []coppice.Flow{}
			for flow, err := range client.Egress(c.Context(), ws.ID, f) {
				if err != nil {
					return err
				}
				if list = append(list, flow); len(list) == limit {
					break
				}
			}
			omitted, err := client.EgressOmitted(c.Context(), ws.ID)
			if err != nil {
				return err
			}
			if omitted != nil {
				fmt.Fprintf(c.ErrOrStderr(), "%d flows between %s and %s are counted by host and not listed one by one, because the workspace or its project has reached its bound of rows.\n",
					omitted.Count, render.Moment(omitted.FirstAt), render.Moment(omitted.LastAt))
			}
			return a.Print(list, func(w io.Writer) error { return printFlows(w, list) })
		},
	}
	fl := c.Flags()
	fl.BoolVar(&denied, "denied", false, "only denied flows")
	fl.StringVar(&f.Host, "host", "", "only flows to this `host`")
	fl.IntVar(&limit, "limit", 100, "show at most this `number`; 0 shows all")
	return c
}

// NewEffectsCommand makes the command "coppice ckpt effects".
func NewEffectsCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "effects CHECKPOINT",
		Short: "Show what may have changed outside on the path to a checkpoint",
		Long: `Show what may have changed outside on the path from the root to a checkpoint, in the order of events: requests other than GET, HEAD and
OPTIONS, and connections whose requests are not visible. Each row has a node; a new fork of that node's parent does the same again. Beyond a
bound of rows, flows are counted by minute or day and host, shown as "counted": TIMES is their number, TIME is the time of the first one. If
the flows of a count began on both sides of a node's instant, both sides show it.`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, cp, err := find.ClientAndCheckpoint(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			list, err := coppice.Collect(client.Effects(c.Context(), cp.ID))
			if err != nil {
				return err
			}
			return a.Print(list, func(w io.Writer) error { return printEffects(w, list) })
		},
	}
}

func printFlows(w io.Writer, list []coppice.Flow) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "No flows recorded.")
		return err
	}
	rows, below := make([][]string, len(list)), make([]string, len(list))
	for i, f := range list {
		rows[i] = append([]string{render.Moment(f.At), string(f.Outcome), strconv.FormatInt(max(f.Count, 1), 10)}, flowWords(f)...)
		below[i] = request(f)
		switch {
		case f.Reason != "":
			below[i] += ": " + f.Reason
		case f.Rule != "":
			below[i] += ", by the rule " + f.Rule
		}
	}
	return render.TableWithNotes(w, "TIME OUTCOME TIMES DESTINATION STATUS SENT RECEIVED", rows, below)
}

func printEffects(w io.Writer, list []coppice.Effect) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "None: on the path to this checkpoint, workspaces only read, or sent nothing.")
		return err
	}
	rows, below := make([][]string, len(list)), make([]string, len(list))
	for i, e := range list {
		below[i] = request(e.Flow)
		rows[i] = append([]string{render.Short(e.CheckpointID), render.Moment(e.Flow.At), string(e.Flow.Outcome), strconv.FormatInt(max(e.Flow.Count, 1), 10)}, flowWords(e.Flow)...)
	}
	return render.TableWithNotes(w, "NODE TIME OUTCOME TIMES DESTINATION STATUS SENT RECEIVED", rows, below)
}

// request is what was asked for, as far as it was seen.
func request(f coppice.Flow) string {
	switch {
	case f.Opaque && f.Counted:
		return string(f.Protocol) + ", not seen, counted"
	case f.Opaque:
		return string(f.Protocol) + ", not seen"
	case f.Counted:
		return "counted"
	}
	return f.Method + " " + f.Path
}

// flowWords are the words of a flow: its destination, the status and the bytes.
func flowWords(f coppice.Flow) []string {
	status := ""
	if f.Status != 0 {
		status = strconv.Itoa(f.Status)
	}
	whereto := "-" // none, or several
	switch {
	case f.Host != "" && f.Counted && f.Port == 0: // a rule
		whereto = foreign.Visible(f.Host)
	case f.Host != "":
		whereto = foreign.Visible(f.Host) + ":" + strconv.Itoa(f.Port)
	}
	return []string{whereto, render.Dash(status), render.Size(f.SentBytes), render.Size(f.ReceivedBytes)}
}
