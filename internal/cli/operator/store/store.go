// Package store has the commands that check and clean the store of sealed checkpoints.
package store

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewCommand makes the command "coppice store".
func NewCommand(a *cli.App) *cobra.Command {
	c := &cobra.Command{
		Use:   "store",
		Short: "Maintain the store of sealed checkpoints",
	}
	c.AddCommand(newCheckCommand(a), newGCCommand(a))
	return c
}

func newGCCommand(a *cli.App) *cobra.Command {
	var dryRun bool
	c := &cobra.Command{
		Use:   "gc",
		Short: "Remove unreferenced objects from the store",
		Long: `Remove objects from the store that nothing references: those of deleted checkpoints and of abandoned uploads. The controllers do this every
minute. Objects stay for a grace period of an hour (--store-grace of 'coppice controller').`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			var sum coppice.StoreGarbage
			for {
				g, err := client.CollectStore(c.Context(), dryRun)
				if err != nil {
					return err
				}
				g.Condemned += sum.Condemned
				g.Objects += sum.Objects
				g.Bytes += sum.Bytes
				g.DebrisObjects += sum.DebrisObjects
				g.DebrisBytes += sum.DebrisBytes
				if sum = g; !g.More || dryRun {
					break
				}
			}
			return a.Print(sum, func(w io.Writer) error { return printGarbage(w, sum) })
		},
	}
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only print what would be removed")
	return c
}

func printGarbage(w io.Writer, g coppice.StoreGarbage) error {
	removed := "removed"
	if g.DryRun {
		removed = "to remove"
	}
	_, err := fmt.Fprintf(w, "%d objects (%s) of deleted checkpoints %s, %d more wait for the end of their grace period, %d are newly unreferenced\n%d objects (%s) of abandoned uploads %s, %d more uploads wait\n",
		g.Objects, render.Size(g.Bytes), removed, g.Waiting, g.Condemned, g.DebrisObjects, render.Size(g.DebrisBytes), removed, g.DebrisWaiting)
	return err
}

func newCheckCommand(a *cli.App) *cobra.Command {
	var subset string
	c := &cobra.Command{
		Use:   "check",
		Short: "Compare the store with the database, and verify some of its data",
		Long: `Compare the store with the database, and show objects that are missing, have another size than was written, or are unknown. The command lists
the whole store, and reads no object.

With --read-data-subset the controller also reads all manifests and a part of the data of sealed checkpoints, and verifies them: 3/10 is the
third of ten parts, which together are everything; 10% is a random one of ten; 100% is everything. A damaged object is shown with the
checkpoints that need it.

The exit status is 1 if there is a problem.`,
		Example: `  coppice store check --read-data-subset=10%
  coppice store check --read-data-subset=$(( $(date +%j) % 30 + 1 ))/30     # everything in thirty days`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			part, err := parseSubset(subset)
			if err != nil {
				return err
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			done := a.Working(c.Context(), "listing the store")
			report, err := client.CheckStore(c.Context())
			done()
			if err != nil {
				return err
			}
			out := storeCheck{StoreReport: report}
			if subset != "" {
				if out.Data, err = readData(c.Context(), a, client, part); err != nil {
					return err
				}
			}
			if err := a.Print(out, func(w io.Writer) error { return printStoreCheck(w, out) }); err != nil {
				return err
			}
			if !report.Sound || out.Data != nil && len(out.Data.Problems) > 0 {
				return exit.StatusError(exit.Failure)
			}
			return nil
		},
	}
	c.Flags().StringVar(&subset, "read-data-subset", "", "also read and verify a `part`, as n/t or p%")
	return c
}

func printStoreReport(w io.Writer, r coppice.StoreReport) error {
	fmt.Fprintf(w, "%d objects (%s) are present; %d of uploads under way, %d to be removed\n", r.Objects, render.Size(r.Bytes), r.Uploading, r.Debris)
	for _, group := range []struct {
		what string
		list []coppice.StoreObject
	}{{"missing", r.Missing}, {"other size", r.Resized}, {"foreign", r.Foreign}} {
		for _, o := range group.list {
			fmt.Fprintf(w, "%-10s  %s (%s)\n", group.what, foreign.Visible(o.Key), render.Size(o.Bytes))
		}
	}
	if r.Truncated {
		fmt.Fprintln(w, "and more")
	}
	return nil
}
