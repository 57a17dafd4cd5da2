package runner

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
	"github.com/coppice-dev/coppice/internal/mtls"
)

// certify gives the runner a certificate of a cluster, as a controller does.
func (r *fakeRig) certify(ca *mtls.Authority, life time.Duration) {
	r.t.Helper()
	request, err := r.Attestor().Request()
	if err != nil {
		r.t.Fatal(err)
	}
	public, err := mtls.RequestedAttestation(request)
	if err != nil {
		r.t.Fatal(err)
	}
	der, err := ca.IssueAttestation(public, attest.RunnerName(r.ID()), 0, life)
	if err == nil {
		err = r.Attestor().Certify("test", der)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// TestAttest: the runner signs for a fork, and returns the same statement again, also after its restart.
func TestAttest(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(*Config) {})
	template := r.boot()
	ask := func(c runnerapi.Child) runnerapi.ChildResult {
		t.Helper()
		out, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: template, Children: []runnerapi.Child{c}})
		if err != nil {
			t.Fatal(err)
		}
		return out.Children[0]
	}
	if got := ask(r.child()); got.Problem != nil || got.Attestation != nil {
		t.Errorf("without a certificate: %+v", got)
	}
	ca, err := mtls.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	trust, err := attest.NewAuthority(ca.Certificate())
	if err != nil {
		t.Fatal(err)
	}
	r.certify(ca, time.Hour)
	child := r.child()
	first := ask(child)
	v, err := trust.VerifyRunner(first.Attestation)
	if err != nil {
		t.Fatal(err)
	}
	steps, err := attest.StepsOf(first.Reseal.Steps)
	if err != nil {
		t.Fatal(err)
	}
	info, err := r.Info()
	if err != nil {
		t.Fatal(err)
	}
	want := attest.Predicate{
		ClusterID: "test", WorkspaceID: child.WorkspaceID, Epoch: child.Epoch, SandboxID: child.SandboxID, Generation: child.Identity.Generation,
		Checkpoint: attest.Checkpoint{ID: template}, Image: v.Statement.Predicate.Image, Hostname: child.Identity.Hostname, MachineID: child.Identity.MachineID,
		MAC: child.Identity.MAC, IP: child.Identity.IP, Egress: string(child.Egress), Steps: steps, Runner: attest.Runner{ID: r.ID()},
		VMM: attest.VMM{Name: info.Class.VMM, Version: info.Class.VMMVersion, MachineType: info.Class.MachineType, Accelerator: info.Class.Accelerator, Arch: info.Class.Arch},
	}
	if diff := attest.Difference(want, v.Statement.Predicate); diff != "" {
		t.Error(diff)
	}
	path := filepath.Join(r.cfg.DataDir, attestationFile)
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%s: %v, %v", path, fi, err)
	}
	cleanup := r.crash()
	r.start()
	if again := ask(child); again.Problem != nil || !bytes.Equal(again.Attestation, first.Attestation) {
		t.Errorf("after a restart it is another: %v", again.Problem)
	}
	if next := ask(r.child()); next.Problem != nil {
		t.Error(next.Problem.Message)
	} else if _, err := trust.VerifyRunner(next.Attestation); err != nil {
		t.Errorf("the certificate was not kept: %v", err)
	}
	cleanup()
}

// TestUnsignedIsNotReleased: where the key is not vouched for any more, a fork fails and leaves nothing.
func TestUnsignedIsNotReleased(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(*Config) {})
	template := r.boot()
	ca, err := mtls.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	r.certify(ca, -time.Second)
	out, err := r.Fork(context.WithoutCancel(t.Context()), runnerapi.Fork{CheckpointID: template, Children: []runnerapi.Child{r.child()}})
	if err != nil {
		t.Fatal(err)
	}
	if p := out.Children[0].Problem; p == nil || p.Code != core.CodeAttestationRefused {
		t.Errorf("%+v", out.Children[0])
	}
	r.wantOnly()
	r.certify(ca, time.Hour)
	r.wantOnly(r.fork(template))
}

// TestRejoinedHost: a host that joined again is another runner, and holds what it captured before. Where it is to verify it, what
// it grows is of bytes that it fetched and verified, and says so. What it does not have to verify stays as it is.
func TestRejoinedHost(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	r := p.runner(nil)
	ids, root := p.forest(r, 2)
	s := r.fork(ids[1]) // it keeps running
	ca, err := mtls.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	trust, err := attest.NewAuthority(ca.Certificate())
	if err != nil {
		t.Fatal(err)
	}
	r.certify(ca, time.Hour)
	forkFrom := func(id core.CheckpointID, verify bool) attest.Checkpoint {
		t.Helper()
		out, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: id, Children: []runnerapi.Child{r.child(), r.child()}, Sources: p.sources(id, root), Verify: verify})
		if err != nil {
			t.Fatal(err)
		}
		var last attest.Checkpoint
		for _, c := range out.Children {
			if c.Problem != nil {
				t.Fatal(c.Problem.Message)
			}
			v, err := trust.VerifyRunner(c.Attestation)
			if err != nil {
				t.Fatal(err)
			}
			last = v.Statement.Predicate.Checkpoint
		}
		return last
	}
	if got := forkFrom(ids[0], false); got.Manifest != "" {
		t.Errorf("what was captured here was verified against %s", got.Manifest)
	}
	if err := r.Discard(ids[0]); err != nil { // one in the trash is replaced too
		t.Fatal(err)
	}
	for range 2 {
		if got, want := forkFrom(ids[0], true), p.sources(ids[0])[0].Digest; got.Manifest != want {
			t.Errorf("the manifest is %q, not %s", got.Manifest, want)
		}
	}
	if rec := r.recordOf(t, ids[0]); !rec.Fetched {
		t.Error("the copy is still the one that was captured")
	}
	if rec := r.recordOf(t, ids[1]); rec.Fetched {
		t.Error("another checkpoint was replaced")
	}
	if got := forkFrom(ids[0], false); got.Manifest == "" {
		t.Error("the copy that was verified does not count as verified")
	}
	// A store that does not answer takes nothing away.
	sources := p.sources(ids[1], root)
	sources[0].Manifest += "-gone"
	if _, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: ids[1], Children: []runnerapi.Child{r.child()}, Sources: sources, Verify: true}); err == nil {
		t.Error("a fork whose manifest is not in the store succeeded")
	}
	if !r.has(ids[1]) {
		t.Error("the copy is lost")
	}
	if got, err := r.Sandbox(s); err != nil || got.State != runnerapi.SandboxReady {
		t.Errorf("the sandbox that ran: %+v, %v", got, err)
	}
}
