// Package attestor keeps the key with which a runner signs its reseal reports, and the key's
// certificate from the cluster's authority.
package attestor

import (
	"crypto/ed25519"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/attest"
	"github.com/coppice-dev/coppice/internal/mtls"
)

// Attestor signs for a runner. It is safe for concurrent use.
type Attestor struct {
	path   string
	runner core.RunnerID
	key    ed25519.PrivateKey

	mu      sync.Mutex // guards what follows
	cluster string
	signer  *attest.Signer // nil while there is no certificate
	unkept  bool           // the certificate is used and not in the file
}

// file is the stored form, readable by the runner's user only.
type file struct {
	Key         []byte `json:"key"` // PKCS#8
	Certificate []byte `json:"certificate,omitempty"`
	ClusterID   string `json:"cluster_id,omitempty"` // whose authority issued it
}

// Open reads the key from a file, or makes it. A certificate of another runner is not used: its host has joined again.
func Open(path string, runner core.RunnerID) (*Attestor, error) {
	var f file
	err := atomicfile.ReadJSON(path, &f)
	if errors.Is(err, os.ErrNotExist) {
		a := &Attestor{path: path, runner: runner}
		if a.key, err = attest.NewKey(); err != nil {
			return nil, err
		}
		return a, a.keep("", nil)
	}
	if err != nil {
		return nil, err
	}
	parsed, err := x509.ParsePKCS8PrivateKey(f.Key)
	key, ok := parsed.(ed25519.PrivateKey)
	if err != nil || !ok {
		return nil, core.Wrapf(err, core.DataLoss, core.CodeInternal, "%s does not hold an attestation key; remove it, and the runner makes a new one", path)
	}
	a := &Attestor{path: path, runner: runner, key: key}
	if signer, err := a.signerOf(f.Certificate); err == nil {
		a.cluster, a.signer = f.ClusterID, signer
	}
	return a, nil
}

func (a *Attestor) keep(cluster string, certificate []byte) error {
	secret, err := x509.MarshalPKCS8PrivateKey(a.key)
	if err != nil {
		return err
	}
	return atomicfile.WriteJSON(a.path, file{Key: secret, Certificate: certificate, ClusterID: cluster}, 0o600)
}

func (a *Attestor) signerOf(der []byte) (*attest.Signer, error) {
	signer, err := attest.NewSigner(a.key, der)
	if err != nil {
		return nil, err
	}
	return signer, signer.Certificate().VerifyHostname(attest.RunnerName(a.runner))
}

// Renewal asks for the next certificate. It is nil while the present one is in the first half of its life.
func (a *Attestor) Renewal(now time.Time) ([]byte, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.signer != nil {
		cert := a.signer.Certificate()
		if now.Before(cert.NotBefore.Add(cert.NotAfter.Sub(cert.NotBefore) / 2)) {
			return nil, nil
		}
	}
	return a.Request()
}

// Request makes a request for a certificate, even if there is one already: that may be from another authority.
func (a *Attestor) Request() ([]byte, error) { return mtls.Request(a.key) }

// Certify uses a certificate of a cluster's authority from now on, and keeps it. If it cannot be kept, it is used nevertheless: see Keep.
func (a *Attestor) Certify(cluster string, der []byte) error {
	signer, err := a.signerOf(der)
	if err != nil {
		return core.Wrapf(err, core.Unavailable, core.CodeAttestationRefused, "the controller sent a certificate that is not of this runner's attestation key")
	}
	a.mu.Lock()
	a.cluster, a.signer, a.unkept = cluster, signer, true
	a.mu.Unlock()
	return a.Keep()
}

// Keep keeps the certificate that is used, if that has not been done.
func (a *Attestor) Keep() error {
	a.mu.Lock()
	cluster, signer, unkept := a.cluster, a.signer, a.unkept
	a.mu.Unlock()
	if !unkept {
		return nil
	}
	if err := a.keep(cluster, signer.Certificate().Raw); err != nil { // signing does not wait for the disk
		return fmt.Errorf("keep the attestation certificate: %w", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unkept = a.signer != signer
	return nil
}

// Sign signs what the runner did. Without a certificate it returns nil: no controller has issued one yet, and none accepts unsigned reports.
func (a *Attestor) Sign(p attest.Predicate) ([]byte, error) {
	a.mu.Lock()
	signer := a.signer
	p.ClusterID, p.Runner.ID = a.cluster, a.runner
	a.mu.Unlock()
	if signer == nil {
		return nil, nil
	}
	return signer.Sign(attest.New(p))
}
