package fleet

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
)

// Register gives a runner its lease. It asks for the runner's images at once, so that lists have them.
func (f *Fleet) Register(ctx context.Context, reg runnerapi.Register) (runnerapi.Registered, error) {
	ctx = request.WithOrigin(ctx, request.Origin{Actor: string(reg.Info.RunnerID), Action: "register"})
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
	r, err := read(ctx, f, func(tx Tx) (model.Runner, error) { return tx.RegisterRunner(ctx, reg, f.cfg.Lease) })
	if err != nil {
		return runnerapi.Registered{}, err
	}
	f.cfg.Log.InfoContext(ctx, "runner registered", "runner_id", r.Info.RunnerID, "lease_epoch", r.LeaseEpoch, "endpoint", r.Endpoint, "vmm", r.Info.Class.VMM)
	if list, err := f.runners.Images(ctx, r.Endpoint); err != nil {
		f.cfg.Log.InfoContext(ctx, "images of a runner not known yet", "runner_id", r.Info.RunnerID, "err", err)
	} else if err := f.recordImages(ctx, r.Info.RunnerID, list); err != nil {
		return runnerapi.Registered{}, err
	}
	certificate := f.certify(ctx, r.Info.RunnerID, reg.AttestationRequest)
	out := runnerapi.Registered{AttestationCertificate: certificate, ClusterID: f.cfg.ClusterID, LeaseEpoch: r.LeaseEpoch, TTLSeconds: f.cfg.Lease.Seconds(), FenceSeconds: f.fenceTime().Seconds()}
	if f.cfg.Trust != nil {
		out.PassKeys = [][]byte{f.cfg.Trust.Passes.Public()}
	}
	return out, nil
}

// certify certifies the attestation key of a runner, if the runner asks for it. The answer to the runner must not fail, because the
// changes that it reports are committed. After a failure the runner asks again.
func (f *Fleet) certify(ctx context.Context, id core.RunnerID, wanted []byte) []byte {
	certificate, err := f.cfg.Certify(id, wanted)
	if err != nil {
		f.cfg.Log.ErrorContext(ctx, "the attestation key of a runner was not certified", "runner_id", id, "err", err)
		return nil
	}
	return certificate
}

// fenceTime is the time without an answer after which a runner ends its sandboxes. It is shorter than the time after which this
// controller gives them up, so that the runner has time to end them.
func (f *Fleet) fenceTime() time.Duration {
	return f.cfg.Lease + f.cfg.Fence - f.cfg.Lease/3
}
