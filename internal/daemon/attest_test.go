package daemon_test

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/attest"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// attested verifies the attestation of a workspace's present epoch as somebody does who has the authority's certificate only.
func attested(t *testing.T, client *coppice.Client, ws coppice.WorkspaceID) (*attest.Authority, attest.Verified) {
	t.Helper()
	authority, err := client.Authority(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode([]byte(authority.Certificate))
	if block == nil {
		t.Fatal("the authority is not PEM")
	}
	trust, err := attest.NewAuthority(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	b, err := client.Attestation(t.Context(), ws, 0)
	if err != nil {
		t.Fatal(err)
	}
	v, err := trust.Verify(b)
	if err != nil || string(v.Statement.Predicate.WorkspaceID) != ws {
		t.Fatalf("%+v, %v", v, err)
	}
	return trust, v
}

// signAs signs with the key that a runner has left on its host.
func signAs(t *testing.T, m *member, p attest.Predicate) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(m.cfg.Runner.DataDir, "runner", "attestation.json"))
	if err != nil {
		t.Fatal(err)
	}
	var f struct {
		Key         []byte `json:"key"`
		Certificate []byte `json:"certificate"`
	}
	if err := json.Unmarshal(b, &f); err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(f.Key)
	key, ok := parsed.(ed25519.PrivateKey)
	if err != nil || !ok {
		t.Fatal(err)
	}
	signer, err := attest.NewSigner(key, f.Certificate)
	if err != nil {
		t.Fatal(err)
	}
	p.Epoch, p.StartedAt, p.FinishedAt = p.Epoch+1, time.Now(), time.Now()
	signed, err := signer.Sign(attest.New(p))
	if err != nil {
		t.Fatal(err)
	}
	return signed
}
