package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// RegisterRunner gives a runner its lease. It asks for the runner's images at once, so that lists have them.
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

// fenceTime is the time without an answer after which a runner ends its sandboxes. It is shorter than the time after which this
// controller gives them up, so that the runner has time to end them.
func (c *Controller) fenceTime() time.Duration {
	return c.cfg.RunnerLease + c.cfg.RunnerFence - c.cfg.RunnerLease/3
}

// checkBeat refuses impossible numbers of heartbeats.
func checkBeat(h runnerapi.Heartbeat, differences *runnerapi.Beat) error {
	if differences != nil && h.Number == 0 {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "number: a heartbeat with differences has a number")
	}
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

// endedKeys says which of the keys that a data plane reports are no longer valid.
func endedKeys(ctx context.Context, tx Tx, keys []core.KeyID) ([]core.KeyID, error) {
	const most = 4096 // of the keys that a runner reports
	if len(keys) == 0 {
		return nil, nil
	}
	return tx.EndedKeys(ctx, keys[:min(len(keys), most)])
}

// lostBecause says why a workspace is lost; it is empty if the workspace is not lost. If an operation moves the workspace into a sandbox
// or out of one, that operation decides instead.
func lostBecause(row HeldSandbox, s runnerapi.Sandbox, there bool) string {
	if !row.Current || row.State != core.WorkspaceReady && row.State != core.WorkspaceCheckpointing {
		return ""
	}
	switch {
	case there && s.State == runnerapi.SandboxDead:
		if s.Exit != "" { // the runner may have ended it
			return core.ClipTail(s.Exit)
		}
		return "its virtual machine ended by itself"
	case !there && row.Settled:
		return "its runner has no sandbox " + string(row.ID) + " any more"
	}
	return ""
}

// stallOf is a runner's report of a sandbox that stands still.
func stallOf(s runnerapi.Sandbox) Stall {
	if s.Stalled == nil || s.State == runnerapi.SandboxDead {
		return Stall{}
	}
	p := s.Stalled.Problem
	return Stall{Since: s.Stalled.Since.Truncate(time.Microsecond), Code: core.Code(core.Clip(string(p.Code))), Message: core.ClipTail(p.Message)} // as the database keeps times
}
