package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	"github.com/coppice-dev/coppice/internal/test/testpool"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// way is a way to fork a checkpoint.
type way struct {
	name   string
	fetch  string // of the runner, --fetch; empty: on the host that has the checkpoint
	first  report.Samples
	ready  report.Samples
	bytes  report.Samples // from the store before the first exec, MiB
	stages report.Stages
}

// localForks is the number of local forks in a round: they are quick.
const localForks = 3

// measureForks forks a checkpoint on the host that has it and on hosts that have nothing at all, in turns, and runs a
// command.
func (b *storeBench) measureForks(ctx context.Context) error {
	b.say("a machine with %d MiB to fork", b.cfg.forkMiB)
	id, err := b.seed(ctx)
	if err != nil {
		return err
	}
	ways := []*way{{name: "local"}, {name: "whole", fetch: "whole"}, {name: "lazy", fetch: "lazy"}}
	if lazy, err := b.isLazy(ctx); err != nil {
		return err
	} else if !lazy {
		ways = ways[:2]
		b.report.NotMeasured = append(b.report.NotMeasured, "lazy memory: this coppice has no --fetch; lazy_remote_over_local and read_before_exec_share are left out")
	}
	if err := b.forkLocally(ctx, id, &way{}); err != nil { // the first one starts the warm shells
		return err
	}
	for i := range b.cfg.rounds {
		b.say("forks, round %d of %d", i+1, b.cfg.rounds)
		for _, w := range ways {
			if w.fetch != "" {
				err = b.forkElsewhere(ctx, id, w, len(ways) > 2)
			} else {
				err = b.forkLocally(ctx, id, w)
			}
			if err != nil {
				return fmt.Errorf("fork, %s: %w", w.name, err)
			}
		}
	}
	b.reportForks(ways)
	return nil
}

// seed makes a checkpoint of a machine that has done some work, and returns it when it is sealed.
func (b *storeBench) seed(ctx context.Context) (coppice.CheckpointID, error) {
	c := b.pool.Client
	ws, err := c.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{Image: b.cfg.image, Resources: coppice.ResourcesRequest{MemoryMiB: &b.cfg.forkMiB}})
	if err != nil {
		return "", fmt.Errorf("create a workspace: %w", err)
	}
	if err := b.exec(ctx, ws.ID, "sh", "-c", b.cfg.work, "0"); err != nil {
		return "", err
	}
	cp, err := c.CreateCheckpoint(ctx, ws.ID, coppice.CreateCheckpointRequest{})
	if err != nil {
		return "", err
	}
	if _, err := c.TerminateWorkspace(ctx, ws.ID); err != nil {
		return "", err
	}
	_, err = b.sealed(ctx, cp.ID)
	return cp.ID, err
}

// isLazy reports whether runners can fetch memory while the guest runs.
func (b *storeBench) isLazy(ctx context.Context) (bool, error) {
	out, err := exec.CommandContext(ctx, b.cfg.coppice, "runner", "--help").Output() //nolint:gosec // G204: the program under test
	return strings.Contains(string(out), " --fetch "), err
}

func (b *storeBench) forkLocally(ctx context.Context, id coppice.CheckpointID, w *way) error {
	for range localForks {
		if err := awaitVMMs(ctx, core.DigestOf([]byte(b.home.Mark)).Hex()[:8], b.cfg.forkMiB, warmShells); err != nil {
			return err
		}
		if err := b.fork(ctx, id, b.home, w); err != nil {
			return err
		}
	}
	return nil
}

// forkElsewhere forks on a host that joins for this fork and leaves afterwards: it has no image, no base and no byte of
// the checkpoint.
func (b *storeBench) forkElsewhere(ctx context.Context, id coppice.CheckpointID, w *way, choose bool) (err error) {
	empty := filepath.Join(b.dir, "no-images")
	if err := os.MkdirAll(empty, 0o700); err != nil {
		return err
	}
	args := []string{"--images-dir", empty}
	if choose {
		args = append(args, "--fetch", w.fetch)
	}
	there, err := b.pool.Join(ctx, args...)
	if err != nil {
		return err
	}
	c := b.pool.Client
	if _, err := c.DrainRunner(ctx, b.home.ID, true); err != nil {
		return err
	}
	err = b.fork(ctx, id, there, w)
	if _, e := c.DrainRunner(ctx, b.home.ID, false); e != nil {
		err = errors.Join(err, e)
	}
	if e := there.Leave(); e != nil {
		err = errors.Join(err, e)
	}
	return errors.Join(err, c.DeleteRunner(ctx, there.ID, true), testpool.RemoveDir(there.Data))
}

// fork makes one child, which must be on the given host, runs a command in it and ends it.
func (b *storeBench) fork(ctx context.Context, id coppice.CheckpointID, on *testpool.Host, w *way) error {
	before, began := on.Relay.Received(), time.Now()
	got, err := b.pool.Client.ForkCheckpoint(ctx, id, coppice.ForkCheckpointRequest{Count: new(1), AllOrNothing: true})
	if err != nil {
		return err
	}
	ready, child := report.Since(began), got.Children[0]
	if err := b.exec(ctx, child.Workspace.ID, "true"); err != nil {
		return err
	}
	w.ready.Add(ready)
	w.first.Add(report.Since(began))
	w.bytes.Add(float64(on.Relay.Received()-before) / mib)
	w.stages.Public(child.Timings)
	ended, err := b.pool.Client.TerminateWorkspace(ctx, child.Workspace.ID)
	if err == nil && child.Workspace.RunnerID != on.ID {
		err = fmt.Errorf("workspace %s was grown on %s instead of %s", ended.ID, child.Workspace.RunnerID, on.ID)
	}
	return err
}

func (b *storeBench) reportForks(ways []*way) {
	var figures []report.Figure
	local := ways[0]
	for _, w := range ways {
		figures = append(figures, w.ready.MS(w.name+": fork to READY", ""), w.first.MS(w.name+": fork to first exec", ""))
		if w.fetch == "" {
			b.report.Stages["local fork"] = w.stages.Medians()
			continue
		}
		figures = append(figures, w.bytes.Figure(w.name+": from the store before the first exec", "MiB", fmt.Sprintf("%.1f %% of %d MiB of RAM", 100*w.bytes.Median()/float64(b.cfg.forkMiB), b.cfg.forkMiB)))
		b.report.Stages["fork elsewhere, "+w.name] = w.stages.Medians()
		most := 0.0
		if w.fetch == "lazy" {
			most = 2.5
			b.report.ratio("read_before_exec_share", w.bytes.Median()/float64(b.cfg.forkMiB), 0.02, fmt.Sprintf("MiB from the store: %.1f of %d of RAM (n=%d)", w.bytes.Median(), b.cfg.forkMiB, len(w.bytes)))
		}
		b.report.ratio(w.name+"_remote_over_local", w.first.Median()/local.first.Median(), most,
			fmt.Sprintf("fork to first exec, ms: %.0f (n=%d) over %.0f (n=%d)", w.first.Median(), len(w.first), local.first.Median(), len(local.first)))
	}
	b.report.Group(fmt.Sprintf("One fork of a checkpoint with %d MiB of RAM, in turns; the other host has nothing", b.cfg.forkMiB), figures...)
}
