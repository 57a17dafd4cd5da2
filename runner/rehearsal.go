package runner

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/internal/undo"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/runner/sealing"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// rehearsals implements sealing.Rehearsals.
type rehearsals struct{ *Runner }

var _ sealing.Rehearsals = rehearsals{}

// rehearsalTime bounds a rehearsal: the pager is asked for every page separately.
const rehearsalTime = 2 * time.Minute

// Rehearse runs a fork of a checkpoint that has all of its memory in a base, before the checkpoint is stored. It learns exactly which
// pages a fork uses until its first command has run. These pages are stored in frames of their own, and a host that must fetch the
// checkpoint fetches them first (docs/adr/0039-a-rehearsal.md). The machine is not a sandbox: nothing outside the runner knows of it, and
// it has no network. Without a pager there is no rehearsal. If a rehearsal fails, only its benefit is lost.
func (r rehearsals) Rehearse(ctx context.Context, ckpt *checkpoints.Opened) {
	if ckpt.Memory.Arriving() || !r.Wanted(ckpt.Record) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, rehearsalTime)
	defer cancel()
	begun := time.Now()
	touched, err := r.rehearseOn(ctx, ckpt)
	log := r.cfg.Log.With("checkpoint_id", ckpt.ID, "duration_ms", core.Milliseconds(time.Since(begun)))
	if err != nil {
		log.WarnContext(ctx, "a fork was not rehearsed; a host that fetches the checkpoint reads more of it at first", "err", err)
		r.lazy.WorkingSets.SetRehearsed(ckpt.Base, nil)
		return
	}
	var extents []memory.Extent
	for _, p := range touched {
		extents = append(extents, memory.Extent{Offset: p.First * memory.PageSize, Length: p.Count * memory.PageSize})
	}
	log.InfoContext(ctx, "a fork was rehearsed", "bytes", memory.TotalBytes(extents))
	r.lazy.WorkingSets.SetRehearsed(ckpt.Base, lazy.EncodeWorkingSet(extents))
}

// Wanted reports whether a checkpoint should be rehearsed once it is complete.
func (r rehearsals) Wanted(rec *checkpoints.Record) bool {
	if r.cfg.Store.Pager == nil || r.cfg.Store.Whole || rec.HasDelta() || rec.WorkingSet != nil || r.lazy.WorkingSets.Of(rec.Base).Rehearsed {
		return false
	}
	return r.compatible(rec.Checkpoint) == nil // otherwise it was made when this runner had another VMM
}

// rehearseOn runs a fork on memory that the pager serves, and returns the pages that it read. Nothing of the fork is left.
func (r rehearsals) rehearseOn(ctx context.Context, ckpt *checkpoints.Opened) (touched []pager.Range, err error) {
	select {
	case r.starting <- struct{}{}:
		defer func() { <-r.starting }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	var steps undo.Stack
	defer func() { err = errors.Join(err, steps.Undo(context.WithoutCancel(ctx))) }()
	recording, err := r.lazy.Record(ctx, ckpt.Base)
	if err != nil {
		return nil, fmt.Errorf("show the memory: %w", err)
	}
	steps.Push("recording", recording.Close)
	f, err := recording.OpenFile(ctx)
	if err != nil {
		return nil, err
	}
	base := memory.Shown(ckpt.Memory.Size, f)
	steps.Push("memory", func(context.Context) error { return base.Close() })
	sh, err := shapeOf(ckpt)
	if err != nil {
		return nil, err
	}
	shell, err := r.newShell(ctx, sh, base, nil)
	if err != nil {
		return nil, err
	}
	steps.Push("machine", func(ctx context.Context) error { return r.dismantle(ctx, shell) })
	s := newSandbox(r.Runner, shell, shell.ID, runnerapi.Sandbox{State: runnerapi.SandboxStarting, Checkpoint: ckpt.ID, Resources: ckpt.Resources}, nil)
	if err := r.perform(ctx, s, ckpt); err != nil {
		return nil, err
	}
	return recording.Touched(ctx)
}

// perform does the same steps as a fork until its first command has run. Only the network stays closed.
func (r rehearsals) perform(ctx context.Context, s *sandbox, ckpt *checkpoints.Opened) error {
	child, err := r.understudy()
	if err != nil {
		return err
	}
	if _, err := sparse.Clone(s.overlay, ckpt.Overlay); err != nil {
		return err
	}
	if err := s.restore(ctx, ckpt); err != nil {
		return err
	}
	if err := errors.Join(s.ns.Assign(ctx, child.Identity), s.machine.Resume(ctx)); err != nil {
		return err
	}
	agent, err := s.agent(ctx)
	if err != nil {
		return vmm.WithConsole(err, s.machine)
	}
	defer agent.Close()
	if _, err := r.reseal(ctx, agent, s.shape.diskBytes, ckpt, child); err != nil {
		return err
	}
	if _, err := agent.Release(ctx, guestapi.ReleaseRequest{Generation: child.Identity.Generation}); err != nil {
		return err
	}
	return warmUp(ctx, agent)
}

// understudy is the child of a rehearsal. It trusts an authority of its own, so that its fork installs an authority, as every fork does.
func (r rehearsals) understudy() (runnerapi.Child, error) {
	authority, err := selfSigned()
	return runnerapi.Child{Identity: r.throwaway(), Egress: r.egress.OpenedWith(core.EgressDenyAll), CA: authority}, err
}

// throwaway is an identity that no sandbox has. Its machine has no network.
func (r *Runner) throwaway() core.Identity {
	b := entropy(16 + 5 + 8)
	gateway, _ := r.cfg.Network.Gateway()
	ip := gateway.Next()
	if !ip.IsValid() {
		ip = netip.MustParseAddr("10.83.0.2")
	}
	return core.Identity{
		Generation: rand.Text(), Hostname: "nobody-" + hex.EncodeToString(b[21:]), MachineID: hex.EncodeToString(b[:16]),
		MAC: net.HardwareAddr(append([]byte{0x02}, b[16:21]...)).String(), IP: ip,
	}
}

// selfSigned makes a self-signed certificate, as PEM.
func selfSigned() (string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", err
	}
	t := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "Coppice rehearsal"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, &key.PublicKey, key)
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), err
}

// workingSetOn is the working set of a new checkpoint. Its machine is on a base and was forked from another checkpoint.
func (r *Runner) workingSetOn(base core.BaseID, parent core.CheckpointID) []byte {
	if b := r.lazy.WorkingSets.Of(base).Pages; b != nil {
		return b
	}
	if rec, err := r.checkpoints.Get(parent); err == nil {
		return rec.WorkingSet
	}
	return nil
}
