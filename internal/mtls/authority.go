package mtls

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"time"

	"github.com/coppice-dev/coppice/core"
)

const (
	authorityLife = 10 * 365 * 24 * time.Hour
	clockSkew     = 5 * time.Minute // a certificate is good that long before it was made
)

// Certificate is a certificate in DER and its key.
type Certificate struct {
	DER []byte
	Key crypto.Signer
}

// Authority signs the certificates of one cluster.
type Authority struct {
	der  []byte
	cert *x509.Certificate
	key  crypto.Signer
}

// NewKey makes a key for a certificate.
func NewKey() (crypto.Signer, error) { return ecdsa.GenerateKey(elliptic.P256(), rand.Reader) }

// NewAuthority makes the authority of a cluster.
func NewAuthority(cluster string) (*Authority, error) {
	key, err := NewKey()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: "coppice " + cluster},
		NotBefore: now.Add(-clockSkew), NotAfter: now.Add(authorityLife),
		KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true, MaxPathLenZero: true,
		PermittedDNSDomainsCritical: true, PermittedDNSDomains: []string{domain},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make the cluster's authority: %w", err)
	}
	return newAuthority(der, key)
}

// LoadAuthority takes an authority up again: its certificate and, in PKCS#8, its key.
func LoadAuthority(der, pkcs8 []byte) (*Authority, error) {
	parsed, err := x509.ParsePKCS8PrivateKey(pkcs8)
	if err != nil {
		return nil, errors.New("the key of the cluster's authority cannot be read")
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok {
		return nil, errors.New("the key of the cluster's authority is of another kind")
	}
	return newAuthority(der, key)
}

func newAuthority(der []byte, key crypto.Signer) (*Authority, error) {
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read the certificate of the cluster's authority: %w", err)
	}
	if public, ok := cert.PublicKey.(*ecdsa.PublicKey); !ok || !public.Equal(key.Public()) {
		return nil, errors.New("the certificate of the cluster's authority is of another key")
	}
	return &Authority{der: der, cert: cert, key: key}, nil
}

// Certificate is the authority's own, in DER.
func (a *Authority) Certificate() []byte { return a.der }

// Key is the authority's key in PKCS#8, to be kept sealed.
func (a *Authority) Key() ([]byte, error) { return x509.MarshalPKCS8PrivateKey(a.key) }

// Pin tells the authority from any other.
func (a *Authority) Pin() string {
	sum := sha256.Sum256(a.der)
	return hex.EncodeToString(sum[:])
}

// PinMatches reports whether a certificate has the pin.
func PinMatches(pin string, der []byte) bool {
	sum := sha256.Sum256(der)
	return subtle.ConstantTimeCompare([]byte(hex.EncodeToString(sum[:])), []byte(pin)) == 1
}

// Issue signs a certificate, for both ends of connections, that names one identity.
func (a *Authority) Issue(public crypto.PublicKey, name string, life time.Duration) ([]byte, error) {
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: now.Add(-clockSkew), NotAfter: now.Add(life),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, public, a.key)
	if err != nil {
		return nil, fmt.Errorf("issue a certificate for %s: %w", name, err)
	}
	return der, nil
}

// IssueAttestation signs the certificate of a key that signs attestations, and does nothing else. It is good at once and since a time ago.
func (a *Authority) IssueAttestation(public ed25519.PublicKey, name string, since, life time.Duration) ([]byte, error) {
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: now.Add(-max(since, clockSkew)), NotAfter: now.Add(life),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning},
		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, public, a.key)
	if err != nil {
		return nil, fmt.Errorf("issue a certificate for the attestations of %s: %w", name, err)
	}
	return der, nil
}

// IssueNew makes a key and a certificate of it.
func (a *Authority) IssueNew(name string, life time.Duration) (Certificate, error) {
	key, err := NewKey()
	if err != nil {
		return Certificate{}, err
	}
	der, err := a.Issue(key.Public(), name, life)
	return Certificate{DER: der, Key: key}, err
}

// Request is what the holder of a key sends to get a certificate for it. It has no name: the controller chooses that.
func Request(key crypto.Signer) ([]byte, error) {
	return x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
}

// Requested returns the key of a request whose sender has proven to hold it. All else in it is ignored.
func Requested(der []byte) (crypto.PublicKey, error) {
	req, err := parseRequest("certificate_request", der)
	if err != nil {
		return nil, err
	}
	key, ok := req.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "certificate_request: the key must be of the curve P-256")
	}
	return key, nil
}

func serial() *big.Int {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails: crypto/rand ends the program instead
	b[0] &= 0x7f
	return new(big.Int).SetBytes(b)
}

// RequestedAttestation is Requested for a key that is to sign attestations.
func RequestedAttestation(der []byte) (ed25519.PublicKey, error) {
	req, err := parseRequest("attestation_request", der)
	if err != nil {
		return nil, err
	}
	key, ok := req.PublicKey.(ed25519.PublicKey)
	if !ok {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "attestation_request: the key must be one of Ed25519")
	}
	return key, nil
}

func parseRequest(field string, der []byte) (*x509.CertificateRequest, error) {
	const largest = 16 << 10
	if len(der) > largest {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "%s: it is too large", field)
	}
	req, err := x509.ParseCertificateRequest(der)
	if err != nil || req.CheckSignature() != nil {
		return nil, core.Wrapf(err, core.Invalid, core.CodeInvalidField, "%s: it is not a signed PKCS#10 request", field)
	}
	return req, nil
}
