package runner

import (
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
	"github.com/coppice-dev/coppice/internal/version"
	"github.com/coppice-dev/coppice/runner/attestor"
	"github.com/coppice-dev/coppice/runner/checkpoints"
)

// attestationFile keeps the key that signs what this runner did, in its data directory.
const attestationFile = "attestation.json"

// Attestor signs the reports of this runner.
func (r *Runner) Attestor() *attestor.Attestor { return r.attestor }

// attest signs the report of a reseal before the workload is released. It returns nil while no controller has certified this runner.
func (r *Runner) attest(began time.Time, ckpt *checkpoints.Opened, child runnerapi.Child, report *core.ResealReport) ([]byte, error) {
	steps, err := attest.StepsOf(report.Steps)
	if err != nil {
		return nil, err
	}
	policy := child.Egress
	if policy == core.EgressProxied { // the runner's form of deny-all
		policy = core.EgressDenyAll
	}
	return r.attestor.Sign(attest.Predicate{
		WorkspaceID: child.WorkspaceID, Epoch: child.Epoch, SandboxID: child.SandboxID, Generation: report.Generation,
		Checkpoint: attest.Checkpoint{ID: ckpt.ID, Manifest: ckpt.Manifest}, Image: ckpt.Image,
		Hostname: child.Identity.Hostname, MachineID: child.Identity.MachineID, MAC: child.Identity.MAC, IP: child.Identity.IP, Egress: string(policy), Steps: steps,
		Runner:    attest.Runner{Version: core.Clip(version.String())},
		VMM:       attest.VMM{Name: r.class.VMM, Version: r.class.VMMVersion, MachineType: r.class.MachineType, Accelerator: r.class.Accelerator, Arch: r.class.Arch},
		StartedAt: began, FinishedAt: time.Now(),
	})
}

// verifiedAs is the digest of the manifest of a fetched checkpoint: every byte was verified against it. A checkpoint that was captured on
// this host has none.
func verifiedAs(ckpt *checkpoints.Opened, sources []runnerapi.Stored) core.Digest {
	if !ckpt.Fetched || len(sources) == 0 || sources[0].CheckpointID != ckpt.ID {
		return ""
	}
	return sources[0].Digest
}
