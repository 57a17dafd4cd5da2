// Package attestations owns the signed reports of reseals. It compares what a runner has signed with the
// rows and the request, has it countersigned by the cluster, and keeps the countersigned reports for a
// time.
package attestations

import (
	"context"
	"log/slog"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/countersign"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
)

// Kept is how long attestations are kept by default.
const Kept = 400 * 24 * time.Hour

// Attestation is a runner's signed report of a reseal, with the cluster's signature.
type Attestation struct {
	Digest   core.Digest // of Envelope; the audit log has it
	Envelope []byte      // as internal/attest writes it
	Epoch    int64
}

// Store runs transactions. Package controller/postgres has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	// InSystem runs fn in a transaction that sees all projects.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx keeps attestations. The transaction that makes a workspace ready inserts them.
type Tx interface {
	Workspace(ctx context.Context, id core.WorkspaceID) (model.Workspace, error)
	// Attestation returns the attestation of an epoch. It fails with ATTESTATION_NOT_FOUND if there is none.
	Attestation(ctx context.Context, id core.WorkspaceID, epoch int64) (Attestation, error)
	// TidyAttestations makes the next partitions and removes attestations that are older than keep, by whole months.
	TidyAttestations(ctx context.Context, keep time.Duration) error
}

// Config says what a keeper works with.
type Config struct {
	ClusterID     string
	Countersigner *countersign.Countersigner // nil without an authority: then no fork is accepted
	Kept          time.Duration              // how long attestations are kept
	Ended         func(outcome string)       // hears of each report: accepted, refused
	Log           *slog.Logger
}

// Keeper accepts and keeps attestations. It is safe for concurrent use.
type Keeper struct {
	cfg   Config
	store Store
}

// New makes a keeper. It starts nothing.
func New(cfg Config, store Store) *Keeper { return &Keeper{cfg: cfg, store: store} }

var errNoAuthority = core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "this controller has no authority that certifies attestation keys")

// Certify issues the certificate of a runner's attestation key, if the runner asks for one.
func (k *Keeper) Certify(id core.RunnerID, request []byte) ([]byte, error) {
	if len(request) == 0 || k.cfg.Countersigner == nil {
		return nil, nil
	}
	return k.cfg.Countersigner.Certify(id, request)
}

// Accept compares a runner's signed report of a child with the request for it, and countersigns it. A child without one is refused.
func (k *Keeper) Accept(ctx context.Context, source model.Checkpoint, child model.Workspace, asked runnerapi.Child, got runnerapi.ChildResult) ([]byte, error) {
	signed, err := k.countersigned(source, child, asked, got)
	outcome := "accepted"
	if err != nil {
		outcome = "refused"
		err = core.Wrapf(err, core.Unavailable, core.CodeAttestationRefused, "sandbox %s is refused and will be destroyed, because the attestation of its reseal was refused: %s",
			asked.SandboxID, core.MessageOf(err))
		k.cfg.Log.WarnContext(ctx, "attestation refused", "runner_id", child.Sandbox.RunnerID, "sandbox_id", asked.SandboxID, "err", err)
	}
	k.cfg.Ended(outcome)
	return signed, err
}

func (k *Keeper) countersigned(source model.Checkpoint, child model.Workspace, asked runnerapi.Child, got runnerapi.ChildResult) ([]byte, error) {
	if k.cfg.Countersigner == nil {
		return nil, errNoAuthority
	}
	want, err := wanted(k.cfg.ClusterID, source, child, asked, got.Reseal)
	if err != nil {
		return nil, err
	}
	return k.cfg.Countersigner.Accept(got.Attestation, want, child.Sandbox.RunnerID == source.RunnerID)
}

// wanted is the statement that the attestation of a child must have. It follows from the rows, the request, and the child's report.
func wanted(cluster string, source model.Checkpoint, child model.Workspace, asked runnerapi.Child, report *core.ResealReport) (attest.Predicate, error) {
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

// Get returns the attestation of a workspace's epoch; 0 means the present one.
func (k *Keeper) Get(ctx context.Context, project core.ProjectID, id core.WorkspaceID, epoch int64) (a Attestation, err error) {
	err = k.store.InProject(ctx, project, func(tx Tx) error {
		w, err := tx.Workspace(ctx, id)
		if err != nil {
			return err
		}
		of := epoch
		if of == 0 {
			of = w.Epoch
		}
		a, err = tx.Attestation(ctx, id, of)
		return err
	})
	return a, err
}

// Authority is the certificate of the cluster's authority, in DER. It is public.
func (k *Keeper) Authority() ([]byte, error) {
	if k.cfg.Countersigner == nil {
		return nil, errNoAuthority
	}
	return k.cfg.Countersigner.Authority(), nil
}

// Tidy is the periodic job that keeps the table's partitions.
func (k *Keeper) Tidy(ctx context.Context) error {
	return k.store.InSystem(ctx, func(tx Tx) error { return tx.TidyAttestations(ctx, k.cfg.Kept) })
}
