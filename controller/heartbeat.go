package controller

import (
	"context"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// RegisterRunner gives a runner its lease. Its images are asked for at once, so that lists know them.
func (c *Controller) RegisterRunner(ctx context.Context, reg runnerapi.Register) (runnerapi.Registered, error) {
	ctx = WithOrigin(ctx, Origin{Actor: string(reg.Info.RunnerID), Action: "register"})
	switch {
	case reg.Info.Version != runnerapi.Version:
		return runnerapi.Registered{}, core.Errorf(core.FailedPrecondition, core.CodeUnsupported,
			"runner %s speaks protocol version %d and this controller %d; run both from one build", reg.Info.RunnerID, reg.Info.Version, runnerapi.Version)
	case reg.Endpoint == "":
		return runnerapi.Registered{}, core.Errorf(core.Invalid, core.CodeInvalidField, "endpoint: a runner must say where it is reached")
	}
	if _, err := core.ParseID[core.RunnerID](string(reg.Info.RunnerID)); err != nil {
		return runnerapi.Registered{}, err
	}
	var r Runner
	err := c.store.InTx(ctx, System(), func(tx Tx) error {
		var err error
		r, err = tx.RegisterRunner(ctx, reg, c.cfg.RunnerLease)
		return err
	})
	if err != nil {
		return runnerapi.Registered{}, err
	}
	c.log.InfoContext(ctx, "runner registered", "runner_id", r.Info.RunnerID, "lease_epoch", r.LeaseEpoch, "endpoint", r.Endpoint, "vmm", r.Info.Class.VMM)
	c.images.forget(r.Info.RunnerID)
	if list, err := c.runners.Images(ctx, r.Endpoint); err != nil {
		c.log.InfoContext(ctx, "images of a runner not known yet", "runner_id", r.Info.RunnerID, "err", err)
	} else if err := c.recordImages(ctx, r.Info.RunnerID, list); err != nil {
		return runnerapi.Registered{}, err
	}
	certificate := c.certified(ctx, r.Info.RunnerID, reg.AttestationRequest)
	out := runnerapi.Registered{AttestationCertificate: certificate, ClusterID: c.cfg.ClusterID, LeaseEpoch: r.LeaseEpoch, TTLSeconds: c.cfg.RunnerLease.Seconds(), FenceSeconds: c.fenceTime().Seconds()}
	if c.cfg.Trust != nil {
		out.PassKeys = [][]byte{c.cfg.Trust.Passes.Public()}
	}
	return out, nil
}

// fenceTime is after how long without an answer a runner ends its sandboxes: some time before this controller gives them up, in
// which it does so.
func (c *Controller) fenceTime() time.Duration {
	return c.cfg.RunnerLease + c.cfg.RunnerFence - c.cfg.RunnerLease/3
}

// Heartbeat extends a lease and compares what runs with the rows. Living rows exist before a runner is called, so what has
// none is garbage; a settled workspace whose sandbox is dead or missing is LOST.
func (c *Controller) Heartbeat(ctx context.Context, id core.RunnerID, h runnerapi.Heartbeat) (runnerapi.Heartbeated, error) {
	ctx = WithOrigin(ctx, Origin{Actor: string(id), Action: "heartbeat"})
	if err := checkBeat(h); err != nil {
		return runnerapi.Heartbeated{}, err
	}
	out := runnerapi.Heartbeated{Number: h.Number, TTLSeconds: c.cfg.RunnerLease.Seconds(), FenceSeconds: c.fenceTime().Seconds()}
	writes := cleanWrites(h.DataWrites)
	out.DataTaken = len(writes)
	reported := make(map[core.SandboxID]runnerapi.Sandbox, len(h.Sandboxes))
	for _, s := range h.Sandboxes {
		reported[s.ID] = s
	}
	var lost []EndedWorkspace
	var here []core.WorkspaceID
	usage := c.samples.due(h.Usage, c.cfg.UsageInterval)
	err := c.store.InTx(ctx, System(), func(tx Tx) error {
		out.DropSandboxes, out.DropCheckpoints, lost, here = nil, nil, nil, nil
		beaten, err := tx.HeartbeatRunner(ctx, id, h, c.cfg.RunnerLease)
		if err != nil {
			return err
		}
		rows, err := tx.HeldSandboxes(ctx, id, beaten.Settled)
		if err != nil {
			return err
		}
		held, stalls := make(map[core.SandboxID]bool, len(rows)), make(map[core.SandboxID]Stall)
		for _, row := range rows {
			held[row.ID] = true
			here = append(here, row.WorkspaceID)
			s, there := reported[row.ID]
			if stall := stallOf(s); !stall.Since.Equal(row.Stalled) {
				stalls[row.ID] = stall
			}
			if why := lostBecause(row, s, there); why != "" {
				lost = append(lost, EndedWorkspace{ID: row.WorkspaceID, To: core.WorkspaceLost, Sandbox: row.ID, Failure: &Failure{Code: core.CodeSandboxLost, Message: why}})
			}
		}
		for _, s := range h.Sandboxes {
			if !held[s.ID] && s.State != runnerapi.SandboxDead {
				out.DropSandboxes = append(out.DropSandboxes, s.ID)
			}
		}
		if err := tx.SetStalls(ctx, id, stalls); err != nil {
			return err
		}
		if out.EndedKeys, err = endedKeys(ctx, tx, h.DataKeys); err != nil {
			return err
		}
		if out.RemovedRunners, err = tx.RemovedRunners(ctx, c.cfg.CertificateLife+time.Hour, maxRemoved); err != nil {
			return err
		}
		if err := tx.InsertDataWrites(ctx, id, cleanText(h.DataLog, 64), writes); err != nil {
			return err
		}
		known, err := tx.HeldCheckpoints(ctx, id, h.Checkpoints)
		if err != nil {
			return err
		}
		if err := tx.SetCopies(ctx, id, known); err != nil {
			return err
		}
		if err := tx.SetHolds(ctx, id, h.Fetching[:min(len(h.Fetching), maxHolds)]); err != nil {
			return err
		}
		for _, cp := range h.Checkpoints {
			if !slices.Contains(known, cp) {
				out.DropCheckpoints = append(out.DropCheckpoints, cp)
			}
		}
		if err := tx.InsertUsage(ctx, id, usage); err != nil || len(lost) == 0 {
			return err
		}
		_, err = tx.EndWorkspaces(ctx, lost)
		return err
	})
	if err != nil {
		return runnerapi.Heartbeated{}, err
	}
	for _, w := range here { // what a runner says of others is not heard
		if slices.Contains(h.DataUsed, w) {
			c.uses.add(w)
		}
	}
	c.samples.written(usage, c.cfg.UsageInterval)
	for _, l := range lost {
		c.log.WarnContext(ctx, "workspace lost", "workspace_id", l.ID, "runner_id", id, "cause", l.Failure.Message)
	}
	if len(out.DropSandboxes)+len(out.DropCheckpoints) > 0 {
		c.log.InfoContext(ctx, "runner told to drop what has no row", "runner_id", id, "sandboxes", out.DropSandboxes, "checkpoints", out.DropCheckpoints)
	}
	out.AttestationCertificate = c.certified(ctx, id, h.AttestationRequest) // the transaction has found its lease
	return out, nil
}

// checkBeat refuses numbers that no runner counts up to.
func checkBeat(h runnerapi.Heartbeat) error {
	const most = 1 << 53
	if h.Number < 0 || h.Number > most || h.Answered < 0 || h.Answered > 0 && h.Answered >= h.Number {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "number, answered: a heartbeat's numbers are positive, and it was collected after the one that was answered")
	}
	return nil
}

// maxRemoved bounds the removed runners in an answer to a heartbeat. No more can have joined while their certificates are good: see MaxRunnerTokens.
const maxRemoved = MaxRunnerTokens

// maxHolds bounds what a runner says that it fetches.
const maxHolds = 10000

// endedKeys says which of the keys that a data plane was used with are not valid any more.
func endedKeys(ctx context.Context, tx Tx, keys []core.KeyID) ([]core.KeyID, error) {
	const most = 4096 // of what a runner says
	if len(keys) == 0 {
		return nil, nil
	}
	return tx.EndedKeys(ctx, keys[:min(len(keys), most)])
}

// lostBecause says why a workspace is lost; empty when it is not. What is on its way, into a sandbox or out of one, is the
// business of its operation.
func lostBecause(row HeldSandbox, s runnerapi.Sandbox, there bool) string {
	if !row.Current || row.State != core.WorkspaceReady && row.State != core.WorkspaceCheckpointing {
		return ""
	}
	switch {
	case there && s.State == runnerapi.SandboxDead:
		if s.Exit != "" { // it may have been the runner that ended it
			return clipTail(s.Exit)
		}
		return "its virtual machine ended by itself"
	case !there && row.Settled:
		return "its runner has no sandbox " + string(row.ID) + " any more"
	}
	return ""
}

// stallOf is what a runner says of a sandbox that stands still.
func stallOf(s runnerapi.Sandbox) Stall {
	if s.Stalled == nil || s.State == runnerapi.SandboxDead {
		return Stall{}
	}
	p := s.Stalled.Problem
	return Stall{Since: s.Stalled.Since.Truncate(time.Microsecond), Code: core.Code(core.Clip(string(p.Code))), Message: clipTail(p.Message)} // as the database keeps times
}

// clipTail bounds what a VMM and a console said, which ends with what matters, and makes it printable.
func clipTail(s string) string {
	const limit = 2000
	b := []byte(s[max(0, len(s)-limit):])
	for i, ch := range b {
		if ch != '\n' && (ch < 0x20 || ch > 0x7e) {
			b[i] = '?'
		}
	}
	return string(b)
}
