// Package countersign accepts statements of runners: it compares each one with the controller's
// rows and adds the signature of the cluster. Statements of runners do not verify without that
// signature. So a removed runner cannot make anything new.
package countersign

import (
	"crypto/x509"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
	"github.com/coppice-dev/coppice/internal/mtls"
)

const (
	maxAhead = 5 * time.Minute // a runner's clock may be ahead of a controller's by this much
	maxAge   = 24 * time.Hour  // a fork that a controller asks about again, after it was restarted, may be that old
)

// Countersigner has an attestation key of the cluster, of this process only. It is safe for concurrent use.
type Countersigner struct {
	ca    *mtls.Authority
	trust *attest.Authority
	life  time.Duration // of certificates

	mu     sync.Mutex // guards signer
	signer *attest.Signer
}

// New makes one for a cluster's authority.
func New(ca *mtls.Authority, life time.Duration) (*Countersigner, error) {
	trust, err := attest.NewAuthority(ca.Certificate())
	if err != nil {
		return nil, err
	}
	c := &Countersigner{ca: ca, trust: trust, life: life}
	return c, c.try()
}

// try makes a certificate and verifies it as a verifier of attestations does.
func (c *Countersigner) try() error {
	signer, err := c.current()
	if err != nil {
		return err
	}
	root, err := x509.ParseCertificate(c.ca.Certificate())
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AddCert(root)
	_, err = signer.Certificate().Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning}})
	return err
}

// Authority is the certificate that verifiers need, in DER.
func (c *Countersigner) Authority() []byte { return c.ca.Certificate() }

// Certify issues the certificate of a runner's attestation key. The caller knows who asks.
func (c *Countersigner) Certify(id core.RunnerID, request []byte) ([]byte, error) {
	public, err := mtls.RequestedAttestation(request)
	if err != nil {
		return nil, err
	}
	return c.ca.IssueAttestation(public, attest.RunnerName(id), 0, c.life)
}

// Accept returns the envelope with the cluster's signature. It refuses a statement that the runner of want has not signed, or that says anything else
// than want. Only the runner knows the time and the version of its program. A runner that captured the checkpoint itself need not name its manifest.
func (c *Countersigner) Accept(envelope []byte, want attest.Predicate, captured bool) ([]byte, error) {
	if len(envelope) == 0 {
		return nil, refused("runner %s sent no attestation; it must register with this cluster first, and both must be of one version", want.Runner.ID)
	}
	got, err := c.trust.VerifyRunner(envelope)
	if err != nil {
		return nil, err
	}
	p := got.Statement.Predicate
	if captured && p.Checkpoint.Manifest == "" {
		want.Checkpoint.Manifest = ""
	}
	if diff := attest.Difference(want, p); diff != "" {
		return nil, refused("what runner %s signed is not what it was asked for: %s", want.Runner.ID, diff)
	}
	if now := time.Now(); p.FinishedAt.After(now.Add(maxAhead)) || p.StartedAt.Before(now.Add(-maxAge)) {
		return nil, refused("runner %s says that it was done from %s to %s, and it is %s; compare the clocks",
			want.Runner.ID, p.StartedAt.Format(time.RFC3339), p.FinishedAt.Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	signer, err := c.current()
	if err != nil {
		return nil, err
	}
	return signer.Countersign(envelope)
}

func refused(format string, a ...any) error {
	return core.Errorf(core.Unavailable, core.CodeAttestationRefused, format, a...)
}

// current is the key that signs now. It is replaced in the second half of its certificate's life, which covers the past, too: what is
// accepted may be a day old.
func (c *Countersigner) current() (*attest.Signer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.signer != nil && time.Until(c.signer.Certificate().NotAfter) > (c.life+maxAhead)/2 {
		return c.signer, nil
	}
	key, err := attest.NewKey()
	if err != nil {
		return nil, err
	}
	der, err := c.ca.IssueAttestation(attest.PublicOf(key), attest.ClusterName, maxAge+maxAhead, c.life+maxAhead)
	if err != nil {
		return nil, err
	}
	c.signer, err = attest.NewSigner(key, der)
	return c.signer, err
}
