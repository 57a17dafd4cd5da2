package controller_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
	"github.com/coppice-dev/coppice/internal/mtls"
)

// verifier needs the certificate of the authority and nothing else.
func (w *world) verifier() *attest.Authority {
	w.t.Helper()
	der, err := w.Attestations().Authority()
	if err != nil {
		w.t.Fatal(err)
	}
	a, err := attest.NewAuthority(der)
	if err != nil {
		w.t.Fatal(err)
	}
	return a
}

// attested reads and verifies the attestation of an epoch.
func (w *world) attested(id core.WorkspaceID, epoch int64) attest.Verified {
	w.t.Helper()
	got, err := w.Attestations().Get(w.t.Context(), w.project, id, epoch)
	if err != nil {
		w.t.Fatal(err)
	}
	v, err := w.verifier().Verify(got.Envelope)
	if err != nil {
		w.t.Fatal(err)
	}
	if v.Digest != got.Digest {
		w.t.Errorf("the digest is %s, not %s", got.Digest, v.Digest)
	}
	if p := v.Statement.Predicate; p.WorkspaceID != id || p.Epoch != got.Epoch || epoch != 0 && p.Epoch != epoch {
		w.t.Errorf("asked for %s in epoch %d, got %s in epoch %d", id, epoch, p.WorkspaceID, p.Epoch)
	}
	if n := w.number(`SELECT count(*) FROM audit_records WHERE object_id = $1 AND detail ->> 'attestation' = $2`, id, v.Digest); n != 1 {
		w.t.Errorf("the audit log names attestation %s %d times", v.Digest, n)
	}
	return v
}

// TestAttestations: whatever gives a workspace a sandbox leaves an attestation of that epoch, which verifies with the authority alone.
func TestAttestations(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	first := w.attested(ws.ID, 0)
	cp := w.checkpoint(ws.ID)
	for _, child := range w.fork(cp.ID, 3) {
		p := w.attested(child.ID, 0).Statement.Predicate
		if p.Checkpoint.ID != cp.ID || p.Image != ws.Image.Digest || p.Runner.ID != w.runner.ID() || p.Generation == first.Statement.Predicate.Generation {
			t.Errorf("%+v", p)
		}
	}
	if _, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait); err != nil {
		t.Fatal(err)
	}
	w.suspend(ws.ID)
	w.resume(ws.ID)
	for epoch := int64(1); epoch <= 3; epoch++ {
		w.attested(ws.ID, epoch)
	}
	if now := w.attested(ws.ID, 0).Statement.Predicate.Epoch; now != 3 {
		t.Errorf("the present epoch is %d", now)
	}
	if a, err := w.ForkWorkspace(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, controller.ForkRequest{Count: 2}, wait); err != nil || len(a.Result.Children) != 2 {
		t.Fatal(a, err)
	}
	_, err := w.Attestations().Get(t.Context(), w.project, ws.ID, 4)
	wantCode(t, err, core.CodeAttestationNotFound)
	_, err = w.Attestations().Get(t.Context(), core.NewID[core.ProjectID](), ws.ID, 0)
	wantCode(t, err, core.CodeWorkspaceNotFound)
	w.consistent()
}

// otherAuthority is of another cluster.
func otherAuthority(t *testing.T) *mtls.Authority {
	t.Helper()
	ca, err := mtls.NewAuthority("other")
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func signerOf(t *testing.T, ca *mtls.Authority, name string) *attest.Signer {
	t.Helper()
	key, err := attest.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	der, err := ca.IssueAttestation(attest.PublicOf(key), name, 0, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	s, err := attest.NewSigner(key, der)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestLyingRunner: a child whose attestation is not exactly what was asked for is not taken, and is taken down.
func TestLyingRunner(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	ours, err := authority()
	if err != nil {
		t.Fatal(err)
	}
	old := w.attested(ws.ID, 0)
	sibling, err := w.Attestations().Get(t.Context(), w.project, w.fork(cp.ID, 1)[0].ID, 0)
	if err != nil {
		t.Fatal(err)
	}
	resign := func(s *attest.Signer) func(*runnerapi.ChildResult) {
		return func(r *runnerapi.ChildResult) {
			var st attest.Statement
			if v, err := w.verifier().VerifyRunner(r.Attestation); err != nil {
				t.Error(err)
			} else {
				st = v.Statement
			}
			if r.Attestation, err = s.Sign(st); err != nil {
				t.Error(err)
			}
		}
	}
	lie := func(change func(*attest.Predicate)) func() { return func() { w.runner.Lie(change) } }
	tamper := func(change func(*runnerapi.ChildResult)) func() { return func() { w.runner.Tamper(change) } }
	for name, begin := range map[string]func(){
		"no attestation":         tamper(func(r *runnerapi.ChildResult) { r.Attestation = nil }),
		"another workspace":      lie(func(p *attest.Predicate) { p.WorkspaceID = core.NewID[core.WorkspaceID]() }),
		"another epoch":          lie(func(p *attest.Predicate) { p.Epoch++ }),
		"another sandbox":        lie(func(p *attest.Predicate) { p.SandboxID = core.NewID[core.SandboxID]() }),
		"another generation":     lie(func(p *attest.Predicate) { p.Generation = "another" }),
		"another checkpoint":     lie(func(p *attest.Predicate) { p.Checkpoint.ID = core.NewID[core.CheckpointID]() }),
		"a manifest of its own":  lie(func(p *attest.Predicate) { p.Checkpoint.Manifest = core.DigestOf([]byte("x")) }),
		"another image":          lie(func(p *attest.Predicate) { p.Image = core.DigestOf([]byte("x")) }),
		"another address":        lie(func(p *attest.Predicate) { p.IP = p.IP.Next() }),
		"another hostname":       lie(func(p *attest.Predicate) { p.Hostname = "x" }),
		"another policy":         lie(func(p *attest.Predicate) { p.Egress = string(core.EgressAllowAll) }),
		"a step less":            lie(func(p *attest.Predicate) { p.Steps = p.Steps[1:] }),
		"another evidence":       lie(func(p *attest.Predicate) { p.Steps[0].Evidence = core.DigestOf([]byte("x")) }),
		"another VMM":            lie(func(p *attest.Predicate) { p.VMM.Version = "x" }),
		"another cluster":        lie(func(p *attest.Predicate) { p.ClusterID = "x" }),
		"another runner":         lie(func(p *attest.Predicate) { p.Runner.ID = core.NewID[core.RunnerID]() }),
		"a time to come":         lie(func(p *attest.Predicate) { p.FinishedAt = p.FinishedAt.Add(time.Hour) }),
		"a report that differs":  tamper(func(r *runnerapi.ChildResult) { r.Reseal.Steps[0].Evidence["draw_00"] = "x" }),
		"a changed byte":         tamper(func(r *runnerapi.ChildResult) { r.Attestation[len(r.Attestation)/2] ^= 1 }),
		"what was countersigned": tamper(func(r *runnerapi.ChildResult) { r.Attestation = sibling.Envelope }),
		"what is too long":       tamper(func(r *runnerapi.ChildResult) { r.Attestation = bytes.Repeat([]byte(" "), attest.MaxEnvelope+1) }),
		"the key of another":     tamper(resign(signerOf(t, ours, attest.RunnerName(core.NewID[core.RunnerID]())))),
		"the name of the cluster": tamper(func(r *runnerapi.ChildResult) {
			resign(signerOf(t, ours, attest.ClusterName))(r)
		}),
		"another authority": tamper(resign(signerOf(t, otherAuthority(t), attest.RunnerName(w.runner.ID())))),
	} {
		begin()
		before, held := w.number(`SELECT count(*) FROM attestations`), len(w.runner.Sandboxes())
		a, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 1}, wait)
		if core.CodeOf(err) != core.CodeForkFailed || !strings.Contains(err.Error(), string(core.CodeAttestationRefused)) {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
		_, err = w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait)
		if core.CodeOf(err) != core.CodeAttestationRefused {
			t.Errorf("%s: restored in place: %v", name, err)
		}
		if after := w.number(`SELECT count(*) FROM attestations`); after != before {
			t.Errorf("%s: %d attestations more", name, after-before)
		}
		if now := len(w.runner.Sandboxes()); now != held {
			t.Errorf("%s: the runner holds %d sandboxes, not %d", name, now, held)
		}
		w.runner.Lie(nil)
		w.runner.Tamper(nil)
	}
	if now := w.attested(ws.ID, 0); now.Digest != old.Digest {
		t.Error("the workspace is in another epoch")
	}
	w.fork(cp.ID, 1)
	w.consistent()
}

// TestRemovedRunner: what a runner signs after it was removed is not countersigned, and does not verify without, although its certificate
// is good. A fork that was under way then leaves none.
func TestRemovedRunner(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	before := w.attested(ws.ID, 0)
	g := w.gate(runnertest.PointFork + runnertest.Done)
	forked := make(chan controller.Answer, 1)
	go func() {
		a, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 2}, wait)
		if err != nil {
			t.Log(err)
		}
		forked <- a
	}()
	<-g.reached
	count := w.number(`SELECT count(*) FROM attestations`)
	if err := w.Fleet().Remove(t.Context(), w.runner.ID(), true); err != nil {
		t.Fatal(err)
	}
	close(g.open)
	for _, child := range (<-forked).Result.Children {
		if child.Problem == nil {
			t.Errorf("a child on a removed runner is ready: %+v", child)
		}
	}
	if now := w.number(`SELECT count(*) FROM attestations`); now != count {
		t.Errorf("%d attestations were made on a removed runner", now-count)
	}
	p := before.Statement.Predicate
	p.Epoch++
	p.StartedAt, p.FinishedAt = time.Now(), time.Now()
	signed, err := w.runner.Signer().Sign(attest.New(p))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.verifier().VerifyRunner(signed); err != nil {
		t.Errorf("its certificate is not good: the test shows nothing: %v", err)
	}
	_, err = w.verifier().Verify(signed)
	wantCode(t, err, core.CodeAttestationRefused)
	w.attested(ws.ID, 1) // what it made before is good
}

// TestSecondController: two controllers of a cluster countersign for each other's verifiers.
func TestSecondController(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("main").ID)
	second, _ := w.start(controller.Config{LoopInterval: 50 * time.Millisecond})
	a, err := second.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 1}, wait)
	if err != nil {
		t.Fatal(err)
	}
	w.attested(a.Result.Children[0].Workspace.ID, 0)
}

// TestRunnerCertificate: a heartbeat renews it, and a request that is none gets none and ends no lease.
func TestRunnerCertificate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	request, err := w.runner.AttestationRequest()
	if err != nil {
		t.Fatal(err)
	}
	out, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), runnerapi.Heartbeat{LeaseEpoch: w.epoch, Info: w.runner.Info(), AttestationRequest: request})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.runner.Certify("test", out.AttestationCertificate); err != nil {
		t.Error(err)
	}
	out, err = w.Fleet().Heartbeat(t.Context(), w.runner.ID(), runnerapi.Heartbeat{LeaseEpoch: w.epoch, Info: w.runner.Info(), AttestationRequest: []byte("x")})
	if err != nil || out.AttestationCertificate != nil || out.TTLSeconds == 0 {
		t.Errorf("a request that is none is answered with %+v, %v", out, err)
	}
	_, err = w.Fleet().Heartbeat(t.Context(), w.runner.ID(), runnerapi.Heartbeat{LeaseEpoch: w.epoch + 1, Info: w.runner.Info(), AttestationRequest: request})
	if err == nil {
		t.Error("one without the lease is certified")
	}
}
