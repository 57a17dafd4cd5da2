package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newPinCommand(a *cli.App, pinned bool) *cobra.Command {
	use, short, done := "pin CHECKPOINT...", "Protect checkpoints from deletion", "pinned"
	if !pinned {
		use, short, done = "unpin CHECKPOINT...", "End the protection of checkpoints from deletion", "not pinned"
	}
	return &cobra.Command{
		Use:   use,
		Short: short,
		Args:  cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			found, err := find.Checkpoints(c.Context(), client, args)
			if err != nil {
				return err
			}
			list := []coppice.Checkpoint{}
			failed := argument.EachOf(found, func(cp coppice.Checkpoint) error {
				cp, err := client.PatchCheckpoint(c.Context(), cp.ID, coppice.PatchCheckpointRequest{Pinned: &pinned})
				if err == nil {
					list = append(list, cp)
				}
				return err
			})
			err = a.Print(list, func(w io.Writer) error {
				for _, cp := range list {
					fmt.Fprintf(w, "%s is %s\n", cp.ID, done)
				}
				return nil
			})
			return errors.Join(failed, err)
		},
	}
}

func newRemoveCommand(a *cli.App) *cobra.Command {
	var cascade, dryRun bool
	c := &cobra.Command{
		Use:   "rm CHECKPOINT...",
		Short: "Delete checkpoints; their descendants stay",
		Long:  `Delete checkpoints; their descendants stay. With --cascade, delete their descendants too: all together, or none if one is pinned or in use.`,
		Args:  cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			found, err := find.Checkpoints(c.Context(), client, args)
			if err != nil {
				return err
			}
			if cascade || dryRun {
				results := []coppice.PruneResult{}
				failed := argument.EachOf(found, func(cp coppice.Checkpoint) error {
					res, err := client.DeleteCheckpoints(c.Context(), cp.ID, cascade, dryRun)
					if err == nil {
						results = append(results, res)
					}
					return err
				})
				err = a.Print(results, func(w io.Writer) error {
					for _, res := range results {
						if err := printPrune(w, res); err != nil {
							return err
						}
					}
					return nil
				})
				return errors.Join(failed, err)
			}
			ids := []string{}
			failed := argument.EachOf(found, func(cp coppice.Checkpoint) error {
				if err := client.DeleteCheckpoint(c.Context(), cp.ID); err != nil {
					return fmt.Errorf("%s is not deleted: %w", cp.ID, err)
				}
				ids = append(ids, cp.ID)
				return nil
			})
			if err := a.Print(ids, func(w io.Writer) error {
				for _, id := range ids {
					fmt.Fprintf(w, "%s is deleted\n", id)
				}
				return nil
			}); err != nil {
				return err
			}
			return failed
		},
	}
	c.Flags().BoolVar(&cascade, "cascade", false, "also delete their descendants")
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only print what would be deleted")
	return c
}

// policyFlags say which checkpoints of a tree are kept.
type policyFlags struct {
	best     int
	score    string
	path     bool
	age      time.Duration
	maxBytes string
}

func (p *policyFlags) add(c *cobra.Command) {
	f := c.Flags()
	f.IntVar(&p.best, "keep-best", 0, "keep this many (`how-many`) with the highest scores")
	f.StringVar(&p.score, "score", "score", "the `annotation` that holds the score")
	f.BoolVar(&p.path, "keep-path", false, "also keep the ancestors of every kept checkpoint")
	f.DurationVar(&p.age, "max-age", 0, "delete checkpoints older than this `duration`")
	f.StringVar(&p.maxBytes, "max-bytes", "", "delete the worst until the rest fits into this `size`, such as 500M or 20G")
}

func (p *policyFlags) read() (coppice.RetentionPolicy, error) {
	out := coppice.RetentionPolicy{KeepPathToRoot: p.path, MaxAgeSeconds: int64(p.age / time.Second)}
	if p.best > 0 {
		out.KeepBest = coppice.KeepBest{K: p.best, Annotation: p.score}
	}
	if p.maxBytes != "" {
		var err error
		if out.MaxBytes, err = argument.Size(p.maxBytes); err != nil {
			return out, exit.Misuse(fmt.Errorf("--max-bytes: %w", err))
		}
	}
	if p.best <= 0 && out.MaxAgeSeconds <= 0 && out.MaxBytes <= 0 {
		return out, exit.Misuse(errors.New("say what to keep: --keep-best, --max-age or --max-bytes"))
	}
	return out, nil
}

func newPruneCommand(a *cli.App) *cobra.Command {
	var flags policyFlags
	var dryRun bool
	c := &cobra.Command{
		Use:   "prune CHECKPOINT",
		Short: "Delete what a policy does not keep of a checkpoint and its descendants",
		Long: `Delete what a policy does not keep of a checkpoint and its descendants.

Pinned checkpoints, checkpoints in use and the sources of living workspaces are always kept. --keep-best and --keep-path keep more; --max-age
and --max-bytes choose among the rest. Without these two, all of the rest is deleted.`,
		Example: "  coppice ckpt prune 9r4w6xcv --keep-best 10 --keep-path --dry-run\n  coppice ckpt prune 9r4w6xcv --max-age 24h --max-bytes 20G",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			policy, err := flags.read()
			if err != nil {
				return err
			}
			client, cp, err := find.ClientAndCheckpoint(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			done := a.Working(c.Context(), "pruning")
			res, err := client.PruneCheckpoints(c.Context(), cp.ID, coppice.PruneRequest{
				DryRun: dryRun, KeepBest: policy.KeepBest, KeepPathToRoot: policy.KeepPathToRoot, MaxAgeSeconds: policy.MaxAgeSeconds, MaxBytes: policy.MaxBytes,
			})
			done()
			if err != nil {
				return err
			}
			return a.Print(res, func(w io.Writer) error { return printPrune(w, res) })
		},
	}
	flags.add(c)
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only print what would be deleted")
	return c
}

func printPrune(w io.Writer, res coppice.PruneResult) error {
	rows := make([][]string, 0, len(res.Items))
	left := 0
	for _, i := range res.Items {
		if i.Skipped != "" {
			left++
		}
		rows = append(rows, []string{render.Short(i.CheckpointID), string(i.Reason), render.Size(i.Bytes), i.Skipped})
	}
	if len(rows) > 0 {
		if err := render.Table(w, "CHECKPOINT REASON BYTES LEFT", rows); err != nil {
			return err
		}
	}
	would := "went"
	if res.DryRun {
		would = "would go"
	}
	_, err := fmt.Fprintf(w, "%d %s, %s; %d stay, %s\n", len(rows)-left, would, render.Size(res.Bytes), res.Kept+left, render.Size(res.KeptBytes))
	if err == nil && res.OverBudget {
		_, err = fmt.Fprintln(w, "The checkpoints that must stay exceed --max-bytes.")
	}
	if err == nil && res.Truncated {
		_, err = fmt.Fprintln(w, "There is more to delete: repeat the command.")
	}
	return err
}

func newRetainCommand(a *cli.App) *cobra.Command {
	var flags policyFlags
	var remove, show bool
	c := &cobra.Command{
		Use:   "retain CHECKPOINT",
		Short: "Store a policy for a checkpoint and its descendants; the server applies it every minute",
		Long: `Store a policy for a checkpoint and its descendants. The server applies it about every minute; "coppice ckpt prune" applies a policy once.
With --show, show the stored policy; with --remove, remove it.`,
		Example: "  coppice ckpt retain 9r4w6xcv --keep-best 50 --keep-path --max-age 24h",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, cp, err := find.ClientAndCheckpoint(c.Context(), a, args[0])
			if err != nil {
				return err
			}
			if remove {
				return client.DeleteRetention(c.Context(), cp.ID)
			}
			var got coppice.Retention
			if show {
				got, err = client.Retention(c.Context(), cp.ID)
			} else {
				policy, flagErr := flags.read()
				if flagErr != nil {
					return flagErr
				}
				got, err = client.PutRetention(c.Context(), cp.ID, policy)
			}
			if err != nil {
				return err
			}
			return a.Print(got, func(w io.Writer) error { return printRetention(w, got) })
		},
	}
	flags.add(c)
	c.Flags().BoolVar(&show, "show", false, "show the stored policy")
	c.Flags().BoolVar(&remove, "remove", false, "remove the stored policy")
	c.MarkFlagsMutuallyExclusive("show", "remove")
	return c
}

func printRetention(w io.Writer, r coppice.Retention) error {
	best, age, bytes, path := "", "", "", ""
	if k := r.Policy.KeepBest; k.K > 0 {
		best = fmt.Sprintf("%d by %s", k.K, k.Annotation)
	}
	if r.Policy.MaxAgeSeconds > 0 {
		age = (time.Duration(r.Policy.MaxAgeSeconds) * time.Second).String()
	}
	if r.Policy.MaxBytes > 0 {
		bytes = render.Size(r.Policy.MaxBytes)
	}
	if r.Policy.KeepPathToRoot {
		path = "kept"
	}
	return render.Facts(w, "checkpoint", r.CheckpointID, "keep best", best, "path to root", path, "max age", age, "max bytes", bytes,
		"version", fmt.Sprint(r.Version), "updated", render.Moment(r.UpdatedAt))
}
