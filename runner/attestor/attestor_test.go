package attestor_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/runner/attestor"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// TestAttestor: the key and the certificate outlive a restart, and only a certificate of this key and this runner is used.
func TestAttestor(t *testing.T) {
	t.Parallel()
	path, id := filepath.Join(t.TempDir(), "attestation.json"), core.NewID[core.RunnerID]()
	ca, err := mtls.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	open := func(id core.RunnerID) *attestor.Attestor {
		t.Helper()
		a, err := attestor.Open(path, id)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	issue := func(a *attestor.Attestor, name string, life time.Duration) []byte {
		t.Helper()
		request, err := a.Request()
		if err != nil {
			t.Fatal(err)
		}
		public, err := mtls.RequestedAttestation(request)
		if err != nil {
			t.Fatal(err)
		}
		der, err := ca.IssueAttestation(public, name, 0, life)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	sign := func(a *attestor.Attestor) []byte {
		t.Helper()
		b, err := a.Sign(attest.Predicate{Epoch: 1, Steps: []attest.Step{{Name: "entropy", Status: core.ResealOK}}, FinishedAt: time.Now()})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	a := open(id)
	if b := sign(a); b != nil {
		t.Error("it signs without a certificate")
	}
	if err := a.Certify("c", issue(a, attest.RunnerName(core.NewID[core.RunnerID]()), time.Hour)); core.CodeOf(err) != core.CodeAttestationRefused {
		t.Errorf("the certificate of another runner: %v", err)
	}
	if err := a.Certify("c", []byte("x")); core.CodeOf(err) != core.CodeAttestationRefused {
		t.Errorf("nonsense: %v", err)
	}
	if err := a.Certify("c", issue(a, attest.RunnerName(id), time.Hour)); err != nil {
		t.Fatal(err)
	}
	trust, err := attest.NewAuthority(ca.Certificate())
	if err != nil {
		t.Fatal(err)
	}
	again := open(id)
	v, err := trust.VerifyRunner(sign(again))
	if err != nil || v.Statement.Predicate.Runner.ID != id || v.Statement.Predicate.ClusterID != "c" {
		t.Errorf("%+v, %v", v, err)
	}
	if r, err := again.Renewal(time.Now()); r != nil || err != nil {
		t.Errorf("it asks for another in the first half: %v", err)
	}
	if r, err := again.Renewal(time.Now().Add(40 * time.Minute)); r == nil || err != nil {
		t.Errorf("it asks for none in the second half: %v", err)
	}
	// A disk that does not take the next one is no reason not to use it.
	if err := errors.Join(os.Remove(path), os.Mkdir(path, 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := again.Certify("d", issue(again, attest.RunnerName(id), time.Hour)); err == nil {
		t.Error("a certificate is kept where that is not possible")
	}
	if v, err := trust.VerifyRunner(sign(again)); err != nil || v.Statement.Predicate.ClusterID != "d" {
		t.Errorf("the certificate that was not kept is not used: %+v, %v", v, err)
	}
	if err := again.Keep(); err == nil {
		t.Error("it is kept now")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := again.Keep(); err != nil {
		t.Error(err)
	}
	if v, err := trust.VerifyRunner(sign(open(id))); err != nil || v.Statement.Predicate.ClusterID != "d" {
		t.Errorf("the certificate was not kept later: %+v, %v", v, err)
	}
	if b := sign(open(core.NewID[core.RunnerID]())); b != nil {
		t.Error("another runner on the same host uses the certificate")
	}
	if err := os.WriteFile(path, []byte(`{"key":"eA=="}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := attestor.Open(path, id); err == nil {
		t.Error("a damaged file is taken")
	}
}
