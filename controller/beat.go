package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// Heartbeat extends a lease and compares what runs with the rows. Living rows exist before a runner is called, so a sandbox without
// one is garbage. A settled workspace whose sandbox is dead or missing is LOST.
func (c *Controller) Heartbeat(ctx context.Context, id core.RunnerID, h runnerapi.Heartbeat) (runnerapi.Heartbeated, error) {
	return c.beat(ctx, &beating{Controller: c, id: id, h: h})
}

// Beat is Heartbeat with differences.
func (c *Controller) Beat(ctx context.Context, id core.RunnerID, b runnerapi.Beat) (runnerapi.Heartbeated, error) {
	return c.beat(ctx, &beating{Controller: c, id: id, h: b.Heartbeat, differences: &b})
}

// beating is a heartbeat that is being applied.
type beating struct {
	*Controller
	id          core.RunnerID
	h           runnerapi.Heartbeat
	differences *runnerapi.Beat // nil: h names everything that the runner holds
	reported    map[core.SandboxID]runnerapi.Sandbox
	usage       []runnerapi.Usage // usage that must be written now

	// The results of a transaction.
	out    runnerapi.Heartbeated
	beaten Beaten
	lost   []EndedWorkspace
	here   map[core.WorkspaceID]bool // of the workspaces that were looked up, those on the runner
}

func (c *Controller) beat(ctx context.Context, b *beating) (runnerapi.Heartbeated, error) {
	ctx = WithOrigin(ctx, Origin{Actor: string(b.id), Action: "heartbeat"})
	if err := checkBeat(b.h, b.differences); err != nil {
		return runnerapi.Heartbeated{}, err
	}
	b.h.DataLog, b.h.DataWrites = cleanText(b.h.DataLog, 64), cleanWrites(b.h.DataWrites)
	b.reported = make(map[core.SandboxID]runnerapi.Sandbox, len(b.h.Sandboxes))
	for _, s := range b.h.Sandboxes {
		b.reported[s.ID] = s
	}
	b.usage = c.samples.due(b.h.Usage, c.cfg.UsageInterval)
	if err := c.store.InTx(ctx, System(), func(tx Tx) error { return b.apply(ctx, tx) }); err != nil {
		return runnerapi.Heartbeated{}, err
	}
	for _, w := range b.h.DataUsed { // a runner's reports about other sandboxes are ignored
		if b.here[w] {
			c.idle.Add(w)
		}
	}
	c.samples.written(b.usage, c.cfg.UsageInterval)
	for _, l := range b.lost {
		c.log.WarnContext(ctx, "workspace lost", "workspace_id", l.ID, "runner_id", b.id, "cause", l.Failure.Message)
	}
	if out := b.out; len(out.DropSandboxes)+len(out.DropCheckpoints)+len(out.StrayCheckpoints) > 0 {
		c.log.InfoContext(ctx, "runner told to drop what has no row", "runner_id", b.id,
			"sandboxes", out.DropSandboxes, "checkpoints", out.DropCheckpoints, "strays", out.StrayCheckpoints)
	}
	if sum := b.h.Info.Images; sum != "" && sum != b.beaten.ImagesSum {
		c.refreshImages(b.id, b.beaten.Endpoint)
	}
	b.out.AttestationCertificate = c.certified(ctx, b.id, b.h.AttestationRequest) // the transaction has found its lease
	return b.out, nil
}

// apply does everything in one transaction. The first statement locks the runner's row and decides whether the heartbeat counts.
func (b *beating) apply(ctx context.Context, tx Tx) error {
	b.out = runnerapi.Heartbeated{Number: b.h.Number, TTLSeconds: b.cfg.RunnerLease.Seconds(), FenceSeconds: b.fenceTime().Seconds(), DataTaken: len(b.h.DataWrites)}
	b.lost, b.here = nil, make(map[core.WorkspaceID]bool)
	beaten, err := tx.HeartbeatRunner(ctx, b.id, b.h, b.cfg.RunnerLease)
	if err != nil {
		return err
	}
	b.beaten = beaten
	if b.out.EndedKeys, err = endedKeys(ctx, tx, b.h.DataKeys); err != nil {
		return err
	}
	if b.out.RemovedRunners, err = tx.RemovedRunners(ctx, b.cfg.CertificateLife+time.Hour, maxRemoved); err != nil {
		return err
	}
	if err := tx.InsertDataWrites(ctx, b.id, b.h.DataLog, b.h.DataWrites); err != nil {
		return err
	}
	if err := tx.SetHolds(ctx, b.id, b.h.Fetching[:min(len(b.h.Fetching), maxHolds)]); err != nil {
		return err
	}
	if err := tx.InsertUsage(ctx, b.id, b.usage); err != nil {
		return err
	}
	if b.differences != nil && !beaten.Next { // they are differences to a state that is not in the rows
		b.out.AllSandboxes, b.out.AllCheckpoints = true, true
		return nil
	}
	if err := b.sandboxes(ctx, tx, beaten.Settled); err != nil {
		return err
	}
	if err := b.checkpoints(ctx, tx); err != nil {
		return err
	}
	if len(b.lost) > 0 {
		if _, err := tx.EndWorkspaces(ctx, b.lost); err != nil {
			return err
		}
	}
	return b.compareSums(ctx, tx)
}

// sandboxes compares the reported sandboxes with the rows.
func (b *beating) sandboxes(ctx context.Context, tx Tx, settled time.Time) error {
	which := HeldFilter{Settled: settled, All: b.differences == nil || b.differences.AllSandboxes}
	if !which.All {
		for id := range b.reported {
			which.Sandboxes = append(which.Sandboxes, id)
		}
		which.Workspaces = b.h.DataUsed
	}
	rows, err := tx.HeldSandboxes(ctx, b.id, which)
	if err != nil {
		return err
	}
	held, stalls := make(map[core.SandboxID]bool, len(rows)), make(map[core.SandboxID]Stall)
	for _, row := range rows {
		held[row.ID] = true
		b.here[row.WorkspaceID] = true
		s, there := b.reported[row.ID]
		if !there && !which.All {
			continue // it is as it was
		}
		if stall := stallOf(s); !stall.Since.Equal(row.Stalled) {
			stalls[row.ID] = stall
		}
		if why := lostBecause(row, s, there); why != "" {
			b.lost = append(b.lost, EndedWorkspace{ID: row.WorkspaceID, To: core.WorkspaceLost, Sandbox: row.ID, Failure: &Failure{Code: core.CodeSandboxLost, Message: why}})
		}
	}
	for _, s := range b.h.Sandboxes {
		if !held[s.ID] && s.State != runnerapi.SandboxDead {
			b.out.DropSandboxes = append(b.out.DropSandboxes, s.ID)
		}
	}
	return tx.SetStalls(ctx, b.id, stalls)
}

// checkpoints records which checkpoints the runner has, and finds those that it should not have.
func (b *beating) checkpoints(ctx context.Context, tx Tx) error {
	held, err := tx.HeldCheckpoints(ctx, b.id, b.h.Checkpoints)
	if err != nil {
		return err
	}
	known := append(held.Copies, held.Capturing...) // a checkpoint that was captured meanwhile was also recorded meanwhile
	if b.differences == nil || b.differences.AllCheckpoints {
		err = tx.SetCopies(ctx, b.id, known)
	} else if len(known)+len(b.differences.GoneCheckpoints) > 0 {
		err = tx.ChangeCopies(ctx, b.id, known, b.differences.GoneCheckpoints)
	}
	b.out.Unsettled, b.out.DropCheckpoints = held.Capturing, held.Deleted
	sorted := make(map[core.CheckpointID]bool, len(known)+len(held.Deleted))
	for _, id := range append(known, held.Deleted...) {
		sorted[id] = true
	}
	for _, id := range b.h.Checkpoints {
		if !sorted[id] {
			b.out.StrayCheckpoints = append(b.out.StrayCheckpoints, id)
		}
	}
	return err
}

// compareSums asks the runner for a whole list if the runner's checksum differs from that of the rows. A list that it has sent whole was
// compared already.
func (b *beating) compareSums(ctx context.Context, tx Tx) error {
	if b.differences == nil {
		return nil
	}
	sandboxes, checkpoints, err := tx.HeldSums(ctx, b.id, b.h.Checkpoints)
	b.out.AllSandboxes = !b.differences.AllSandboxes && sandboxes != b.differences.SandboxSum
	b.out.AllCheckpoints = !b.differences.AllCheckpoints && checkpoints != b.differences.CheckpointSum
	return err
}
