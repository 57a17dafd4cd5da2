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

// TestAttest: a fork is signed for, and whoever asks again, also after a restart of the runner, gets the same.
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
	bury := r.crash()
	r.start()
	if again := ask(child); again.Problem != nil || !bytes.Equal(again.Attestation, first.Attestation) {
		t.Errorf("after a restart it is another: %v", again.Problem)
	}
	if next := ask(r.child()); next.Problem != nil {
		t.Error(next.Problem.Message)
	} else if _, err := trust.VerifyRunner(next.Attestation); err != nil {
		t.Errorf("the certificate was not kept: %v", err)
	}
	bury()
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
