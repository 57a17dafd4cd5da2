package checkpoint

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newPrepareCommand(a *cli.App) *cobra.Command {
	count, ttl := 0, 2*time.Minute
	c := &cobra.Command{
		Use:   "prepare CHECKPOINT",
		Short: "Prepare machines for forks of a checkpoint, or show how many are ready",
		Long: `Prepare machines for forks of a checkpoint. The runner restores the checkpoint into --count machines before a fork is asked for, so that
forks become ready sooner. --count 0 ends this. Without --count, the command shows how many machines are ready, and what became of the others.

The runner prepares at most --prepare-max machines for all checkpoints together, and none by default.`,
		Example: "  coppice ckpt prepare before-upgrade --count 4\n  coppice ckpt prepare before-upgrade",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, cp, err := find.ClientAndCheckpoint(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			var got coppice.Prepared
			if c.Flags().Changed("count") {
				seconds := int(ttl.Seconds())
				got, err = client.Prepare(c.Context(), cp.ID, coppice.PrepareRequest{Count: count, TTLSeconds: &seconds})
			} else {
				got, err = client.Prepared(c.Context(), cp.ID)
			}
			if err != nil {
				return err
			}
			return a.Print(got, func(w io.Writer) error { return printPrepared(w, got) })
		},
	}
	c.Flags().IntVar(&count, "count", 0, "number of `machines` that are kept ready")
	c.Flags().DurationVar(&ttl, "ttl", ttl, "how long machines are kept ready, at most 1h")
	return c
}

func printPrepared(w io.Writer, p coppice.Prepared) error {
	ready := fmt.Sprintf("%d of %d", p.Ready, p.Asked)
	if p.GivenUp {
		ready += " (given up: none was taken)"
	}
	return render.Facts(w,
		"ready", ready, "until", render.Moment(p.ExpiresAt), "runner keeps at most", fmt.Sprint(p.Max), "taken", fmt.Sprint(p.Hits), "missed", fmt.Sprint(p.Misses),
		"wasted", fmt.Sprint(p.Wasted), "CPU", fmt.Sprintf("%.1f s taken, %.1f s wasted", p.TakenCPUSeconds, p.WastedCPUSeconds), "memory", render.Size(p.MemoryBytes),
	)
}
