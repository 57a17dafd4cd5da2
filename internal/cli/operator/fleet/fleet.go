// Package fleet has the commands for the runners of a cluster: their list, draining and tokens to join.
package fleet

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewCommand makes the command "coppice fleet".
func NewCommand(a *cli.App) *cobra.Command {
	c := &cobra.Command{
		Use:   "fleet",
		Short: "List runners, and drain them",
	}
	c.AddCommand(newListCommand(a), newDrainCommand(a, true), newDrainCommand(a, false))
	return c
}

func newListCommand(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the runners, newest first",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			list, err := coppice.Collect(client.Runners(c.Context()))
			if err != nil {
				return err
			}
			return a.Print(list, func(w io.Writer) error { return printRunners(w, time.Now(), list) })
		},
	}
}

func printRunners(w io.Writer, now time.Time, list []coppice.Runner) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "No runners. Start one: coppice runner, or coppice dev")
		return err
	}
	rows, below := make([][]string, 0, len(list)), make([]string, 0, len(list))
	for _, r := range list {
		rows = append(rows, []string{
			r.ID, r.Hostname, string(r.State), fmt.Sprintf("%d/%d", r.Allocated.Sandboxes, r.Capacity.Sandboxes), fmt.Sprintf("%d/%d", r.Allocated.VCPUs, r.Capacity.VCPUs),
			fmt.Sprintf("%d/%d", r.Allocated.MemoryMiB, r.Capacity.MemoryMiB), render.Size(r.DiskFreeMB << 20), render.Age(now, r.HeartbeatAt),
		})
		below = append(below, r.Class.VMM+" "+r.Class.VMMVersion+", "+r.Class.Accelerator)
	}
	return render.TableWithNotes(w, "ID HOST STATE SANDBOXES VCPUS MIB DISK-FREE HEARD", rows, below)
}

func newDrainCommand(a *cli.App, on bool) *cobra.Command {
	c := &cobra.Command{
		Use:   "drain RUNNER",
		Short: "Place nothing new on a runner",
		Long: `Place nothing new on a runner. Its workspaces go on, and none moves automatically. To move a workspace to another runner, use 'coppice ws
suspend' and 'coppice ws resume'; the checkpoint of its suspension must be sealed. The runner drains until 'coppice fleet undrain', also
after a restart.`,
		Args: cobra.ExactArgs(1),
	}
	if !on {
		c.Use, c.Short, c.Long = "undrain RUNNER", "Place sandboxes on a runner again", ""
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		client, err := a.Client()
		if err != nil {
			return err
		}
		r, err := client.DrainRunner(c.Context(), args[0], on)
		if err != nil {
			return err
		}
		return a.Print(r, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "%s is %s, with %d sandboxes\n", r.ID, r.State, r.Allocated.Sandboxes)
			return err
		})
	}
	return c
}
