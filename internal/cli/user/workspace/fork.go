package workspace

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/cli/user/grant"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// NewForkCommand makes the command "coppice fork".
func NewForkCommand(a *cli.App) *cobra.Command {
	var flags startFlags
	var count, prepared int
	var name string
	var together, spread bool
	var grants string
	c := &cobra.Command{
		Use:   "fork CHECKPOINT|WORKSPACE",
		Short: "Fork running workspaces from a checkpoint, or from a running workspace",
		Long: `Fork running workspaces from a checkpoint, all at once, each with its own identity. For a running workspace, the same operation first takes a
checkpoint; the workspace goes on. With --prepare, machines for more forks of the checkpoint are kept ready for 2 minutes.`,
		Example: "  coppice fork demo -n 4\n  coppice fork 9r4w6xcv --name attempt -n 8 --ttl 10m",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			s, err := flags.read()
			if err != nil {
				return err
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			ctx := c.Context()
			ws, cp, err := find.Node(ctx, client, args[0])
			if err != nil {
				return err
			}
			if spread && cp == nil {
				return exit.Misuse(errors.New("--spread needs a sealed checkpoint; the new checkpoint of a running workspace is only on its runner"))
			}
			if cp != nil && prepared != 0 { // before the fork: what is refused changes nothing
				if _, err := client.Prepare(ctx, cp.ID, coppice.PrepareRequest{Count: prepared}); err != nil {
					return err
				}
			}
			began := time.Now()
			done := a.Working(ctx, fmt.Sprintf("making %d forks", count))
			var res coppice.ForkResult
			if cp != nil {
				res, err = client.ForkCheckpoint(ctx, cp.ID, coppice.ForkCheckpointRequest{
					Count: &count, BranchName: name, AllOrNothing: together, Spread: spread, Env: s.env, Labels: s.labels, Network: s.network, TTLSeconds: s.ttl,
					IdleSeconds: s.idle, OnIdle: s.onIdle, AutoResume: s.autoResume, OnTTL: s.onTTL, Grants: grant.OfFork(grants),
				})
			} else {
				res, err = client.ForkWorkspace(ctx, ws.ID, coppice.ForkWorkspaceRequest{
					Count: &count, BranchName: name, AllOrNothing: together, Env: s.env, Labels: s.labels, Network: s.network, TTLSeconds: s.ttl,
					IdleSeconds: s.idle, OnIdle: s.onIdle, AutoResume: s.autoResume, OnTTL: s.onTTL, Grants: grant.OfFork(grants),
					Checkpoint: coppice.CreateCheckpointRequest{Prepare: prepared},
				})
			}
			done()
			if err != nil {
				return err
			}
			err = a.Print(res, func(w io.Writer) error {
				if flags.quiet {
					for _, child := range res.Children {
						if child.Workspace != nil {
							fmt.Fprintln(w, child.Workspace.ID)
						}
					}
					return nil
				}
				return printFork(w, res, time.Since(began))
			})
			return errors.Join(err, childFailures(res))
		},
	}
	f := c.Flags()
	f.IntVarP(&count, "count", "n", 1, "how `many`")
	f.StringVar(&name, "name", "", "`name` of the child; for several children, -1, -2, ... are appended")
	f.IntVar(&prepared, "prepare", 0, "number of `machines` to keep ready for more forks of the checkpoint")
	f.BoolVar(&together, "all-or-nothing", false, "if one fails, destroy all")
	f.BoolVar(&spread, "spread", false, "distribute the children evenly over all runners; the checkpoint must be sealed")
	grantsFlag(c, &grants)
	flags.add(c)
	return c
}

// grantsFlag says which grants forks get.
func grantsFlag(c *cobra.Command, grants *string) {
	c.Flags().StringVar(grants, "grants", "", "which `grants` of the parent workspace the children have: inherit (default), none, or names separated by commas")
}

func printFork(w io.Writer, res coppice.ForkResult, wall time.Duration) error {
	rows := [][]string{}
	for _, child := range res.Children {
		if child.Workspace == nil {
			continue
		}
		ws := child.Workspace
		ready := ""
		if !ws.ReadyAt.IsZero() {
			ready = render.Milliseconds(float64(ws.ReadyAt.Sub(ws.CreatedAt).Microseconds()) / 1000)
		}
		rows = append(rows, []string{ws.Name, render.Short(ws.ID), string(ws.State), ws.Network.IP, ready, render.Slowest(child.Timings, 2)})
	}
	if err := render.Table(w, "NAME ID STATE IP READY STAGES", rows); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "%d of %d from checkpoint %s after %.1f s\n", len(rows), len(res.Children), render.Short(res.CheckpointID), wall.Seconds())
	return err
}

// childFailures is the error of a fork if some of its children failed.
func childFailures(res coppice.ForkResult) error {
	var errs []error
	for i, child := range res.Children {
		if child.Problem != nil {
			errs = append(errs, fmt.Errorf("child %d: %w", i+1, child.Problem.Err()))
		}
	}
	return errors.Join(errs...)
}

// NewRestoreCommand makes the command "coppice restore".
func NewRestoreCommand(a *cli.App) *cobra.Command {
	var flags startFlags
	var name, in, grants string
	c := &cobra.Command{
		Use:   "restore CHECKPOINT",
		Short: "Restore a checkpoint: as a new workspace, or in place with --in",
		Long: `Restore a checkpoint as a new workspace.

With --in, the named workspace is rolled back to the checkpoint, in place: its machine is replaced when the new one is ready, and its
sessions end. A suspended workspace runs afterwards. A lost workspace is gone for good: --in makes a new one with its name, environment,
labels and settings. Nothing in the tree is overwritten; later checkpoints have this one as parent.`,
		Example: "  coppice restore before-upgrade --name second-try\n  coppice restore before-upgrade --in demo",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			s, err := flags.read()
			if err != nil {
				return err
			}
			if in != "" && (name != "" || s.env != nil || s.labels != nil || s.network.EgressPolicy != "" || s.ttl != 0 || s.idle != 0 || s.onIdle != "" || s.autoResume || grants != "") {
				return exit.Misuse(errors.New("--in keeps the workspace's name, environment, labels, network, grants and times to live; do not set any of them"))
			}
			client, err := a.Client()
			if err != nil {
				return err
			}
			ctx := c.Context()
			cp, err := find.Checkpoint(ctx, client, args[0])
			if err != nil {
				return err
			}
			began := time.Now()
			var res coppice.RestoreResult
			if in == "" {
				done := a.Working(ctx, "restoring "+render.Short(cp.ID))
				res, err = client.RestoreCheckpoint(ctx, cp.ID, coppice.RestoreCheckpointRequest{
					WorkspaceName: name, Env: s.env, Labels: s.labels, Network: s.network, TTLSeconds: s.ttl,
					IdleSeconds: s.idle, OnIdle: s.onIdle, AutoResume: s.autoResume, OnTTL: s.onTTL, Grants: grant.OfFork(grants),
				})
				done()
			} else {
				ws, err := find.Workspace(ctx, client, in)
				if err != nil {
					return err
				}
				done := a.Working(ctx, "rolling "+ws.Name+" back")
				if ws.State == coppice.WorkspaceLost {
					res, err = client.RestoreCheckpoint(ctx, cp.ID, replacement(ws, time.Now()))
				} else {
					res, err = client.RestoreWorkspace(ctx, ws.ID, cp.ID)
				}
				done()
				if err != nil {
					return err
				}
			}
			if err != nil {
				return err
			}
			return a.Print(res, func(w io.Writer) error {
				ws := res.Workspace
				if flags.quiet {
					_, err := fmt.Fprintln(w, ws.ID)
					return err
				}
				_, err := fmt.Fprintf(w, "%s is ready after %.1f s, at %s, epoch %d: %s, %s\n", ws.Name, time.Since(began).Seconds(), render.Short(cp.ID), ws.Epoch, ws.ID, ws.Network.IP)
				return err
			})
		},
	}
	c.Flags().StringVar(&name, "name", "", "`name` of the new workspace (default: a generated one)")
	c.Flags().StringVar(&in, "in", "", "roll this `workspace` back instead")
	grantsFlag(c, &grants)
	flags.add(c)
	return c
}

// replacement asks for a workspace with the name and the settings of a lost one.
func replacement(lost coppice.Workspace, now time.Time) coppice.RestoreCheckpointRequest {
	req := coppice.RestoreCheckpointRequest{
		WorkspaceName: lost.Name, Env: lost.Env, Labels: lost.Labels, Network: coppice.NetworkRequest{EgressPolicy: lost.Network.EgressPolicy},
		IdleSeconds: lost.IdleSeconds, AutoResume: lost.AutoResume, OnTTL: lost.OnTTL,
	}
	if lost.IdleSeconds > 0 {
		req.OnIdle = lost.OnIdle
	}
	if lost.Network.EgressPolicy == coppice.EgressDenyAll {
		allow := append([]string{}, lost.Network.Allow...)
		req.Network.Allow = &allow
	}
	if left := lost.ExpiresAt.Sub(now); !lost.ExpiresAt.IsZero() && left >= time.Second {
		req.TTLSeconds = int64(left / time.Second)
	}
	return req
}
