package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
)

// AttestationsKept is how long attestations are kept by default.
const AttestationsKept = 400 * 24 * time.Hour

// Attestation is a runner's signed report of a reseal, with the cluster's signature.
type Attestation struct {
	Digest   core.Digest // of Envelope; the audit log has it
	Envelope []byte      // as internal/attest writes it
	Epoch    int64
}

var errNoAuthority = core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "this controller has no authority that certifies attestation keys")

// certify issues the certificate of a runner's attestation key, if the runner asks for one.
func (c *Controller) certify(id core.RunnerID, request []byte) ([]byte, error) {
	if len(request) == 0 || c.countersigner == nil {
		return nil, nil
	}
	return c.countersigner.Certify(id, request)
}

// accept compares a runner's signed report of a child with the request for it, and countersigns it. A child without one is refused.
func (c *Controller) accept(plan *forkPlan, child Workspace, asked runnerapi.Child, got runnerapi.ChildResult) ([]byte, error) {
	signed, err := c.countersigned(plan.source, child, asked, got)
	outcome := "accepted"
	if err != nil {
		outcome = "refused"
		err = core.Wrapf(err, core.Unavailable, core.CodeAttestationRefused, "sandbox %s is refused and will be destroyed, because the attestation of its reseal was refused: %s",
			asked.SandboxID, core.MessageOf(err))
		c.log.Warn("attestation refused", "runner_id", child.Sandbox.RunnerID, "sandbox_id", asked.SandboxID, "err", err)
	}
	c.metrics.attestations.WithLabelValues(outcome).Inc()
	return signed, err
}

func (c *Controller) countersigned(source Checkpoint, child Workspace, asked runnerapi.Child, got runnerapi.ChildResult) ([]byte, error) {
	if c.countersigner == nil {
		return nil, errNoAuthority
	}
	want, err := wanted(c.cfg.ClusterID, source, child, asked, got.Reseal)
	if err != nil {
		return nil, err
	}
	return c.countersigner.Accept(got.Attestation, want, child.Sandbox.RunnerID == source.RunnerID)
}

// wanted is the statement that the attestation of a child must have. It follows from the rows, the request, and the child's report.
func wanted(cluster string, source Checkpoint, child Workspace, asked runnerapi.Child, report *core.ResealReport) (attest.Predicate, error) {
	steps, err := attest.StepsOf(report.Steps)
	if err != nil {
		return attest.Predicate{}, err
	}
	p := attest.Predicate{
		ClusterID: cluster, WorkspaceID: asked.WorkspaceID, Epoch: asked.Epoch, SandboxID: asked.SandboxID, Generation: asked.Identity.Generation,
		Checkpoint: attest.Checkpoint{ID: source.ID}, Image: source.Image.Digest,
		Hostname: asked.Identity.Hostname, MachineID: asked.Identity.MachineID, MAC: asked.Identity.MAC, IP: asked.Identity.IP, Egress: string(asked.Egress), Steps: steps,
		Runner: attest.Runner{ID: child.Sandbox.RunnerID},
	}
	if class := source.Class; class != nil { // a fork runs only where the class is equal
		p.VMM = attest.VMM{Name: class.VMM, Version: class.VMMVersion, MachineType: class.MachineType, Accelerator: class.Accelerator, Arch: class.Arch}
	}
	if len(source.Sources) > 0 && source.Sources[0].CheckpointID == source.ID {
		p.Checkpoint.Manifest = source.Sources[0].Digest
	}
	return p, nil
}

// Attestation returns the attestation of a workspace's epoch; 0 means the present one.
func (c *Controller) Attestation(ctx context.Context, project core.ProjectID, id core.WorkspaceID, epoch int64) (Attestation, error) {
	return read(ctx, c, InProject(project), func(tx Tx) (Attestation, error) {
		w, err := tx.Workspace(ctx, id)
		if err != nil {
			return Attestation{}, err
		}
		if epoch == 0 {
			epoch = w.Epoch
		}
		return tx.Attestation(ctx, id, epoch)
	})
}

// AuthorityCertificate is the certificate of the cluster's authority, in DER. It is public.
func (c *Controller) AuthorityCertificate() ([]byte, error) {
	if c.countersigner == nil {
		return nil, errNoAuthority
	}
	return c.countersigner.Authority(), nil
}

// tidyAttestations is the chore that keeps the table's partitions.
func (c *Controller) tidyAttestations(ctx context.Context) error {
	return c.store.InTx(ctx, System(), func(tx Tx) error { return tx.TidyAttestations(ctx, c.cfg.AttestationsKept) })
}
