package runnertest

import (
	"context"
	"crypto/ed25519"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
	"github.com/coppice-dev/coppice/internal/mtls"
)

// attestation is the state with which the fake signs reports, as a runner does.
type attestation struct {
	key ed25519.PrivateKey

	mu      sync.Mutex // guards what follows
	cluster string
	signer  *attest.Signer
	lie     func(*attest.Predicate)
}

// Lie changes the statement that the fake signs for each child; nil: it signs the requested one.
func (r *Runner) Lie(lie func(*attest.Predicate)) {
	r.attestation.mu.Lock()
	defer r.attestation.mu.Unlock()
	r.attestation.lie = lie
}

// AttestationRequest asks for a certificate of the key that signs.
func (r *Runner) AttestationRequest() ([]byte, error) { return mtls.Request(r.attestation.key) }

// Certify makes the fake sign from now on.
func (r *Runner) Certify(cluster string, der []byte) error {
	if len(der) == 0 {
		return nil
	}
	signer, err := attest.NewSigner(r.attestation.key, der)
	if err != nil {
		return err
	}
	r.attestation.mu.Lock()
	defer r.attestation.mu.Unlock()
	r.attestation.cluster, r.attestation.signer = cluster, signer
	return nil
}

// Signer is the fake's key; nil before it was certified.
func (r *Runner) Signer() *attest.Signer {
	r.attestation.mu.Lock()
	defer r.attestation.mu.Unlock()
	return r.attestation.signer
}

// Registrar is the fleet of a controller in the same process.
type Registrar interface {
	Register(ctx context.Context, in runnerapi.Register) (runnerapi.Registered, error)
}

// Announce registers the fake with the fleet of a controller in the same process.
func (r *Runner) Announce(ctx context.Context, c Registrar) (runnerapi.Registered, error) {
	request, err := r.AttestationRequest()
	if err != nil {
		return runnerapi.Registered{}, err
	}
	out, err := c.Register(ctx, runnerapi.Register{Info: r.Info(), Endpoint: r.Endpoint(), AttestationRequest: request})
	if err != nil {
		return out, err
	}
	return out, r.Certify(out.ClusterID, out.AttestationCertificate)
}

// attest signs the report of a child. r.mu is held.
func (r *Runner) attest(from *checkpoint, child runnerapi.Child, report *core.ResealReport) ([]byte, error) {
	a := &r.attestation
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.signer == nil {
		return nil, nil
	}
	steps, err := attest.StepsOf(report.Steps)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	class := r.cfg.Class
	p := attest.Predicate{
		ClusterID: a.cluster, WorkspaceID: child.WorkspaceID, Epoch: child.Epoch, SandboxID: child.SandboxID, Generation: child.Identity.Generation,
		Checkpoint: attest.Checkpoint{ID: from.ID, Manifest: from.manifest}, Image: from.Image, Hostname: child.Identity.Hostname, MachineID: child.Identity.MachineID,
		MAC: child.Identity.MAC, IP: child.Identity.IP, Egress: string(child.Egress), Steps: steps, Runner: attest.Runner{ID: r.cfg.ID, Version: "fake"},
		VMM:       attest.VMM{Name: class.VMM, Version: class.VMMVersion, MachineType: class.MachineType, Accelerator: class.Accelerator, Arch: class.Arch},
		StartedAt: now, FinishedAt: now,
	}
	if a.lie != nil {
		a.lie(&p)
	}
	return a.signer.Sign(attest.New(p))
}
