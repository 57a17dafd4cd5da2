package ca

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// RootTime and LeafTime are the lifetimes of certificates. An issuer's lifetime is an argument of [Authority.Issuer].
const (
	RootTime = 10 * 365 * 24 * time.Hour
	LeafTime = 2 * time.Hour
)

// skew is the time by which a guest's clock may be behind.
const skew = 5 * time.Minute

// Authority is a certificate with its private key: the root of a project, or an issuer below it.
type Authority struct {
	Certificate []byte `json:"certificate"` // X.509 in DER
	Key         []byte `json:"key"`         // PKCS#8 in DER
}

// NewRoot makes the root of a project.
func NewRoot(project core.ProjectID, now time.Time) (Authority, error) {
	t := template("Coppice egress of "+string(project), now, now.Add(RootTime))
	t.IsCA, t.BasicConstraintsValid, t.KeyUsage, t.MaxPathLen = true, true, x509.KeyUsageCertSign|x509.KeyUsageCRLSign, 1
	return sign(t, nil)
}

// Issuer makes an authority below a root. It can sign for these names, and no others, until the given time.
func (a Authority) Issuer(names []string, now, until time.Time) (Authority, error) {
	if len(names) == 0 {
		return Authority{}, core.Errorf(core.Invalid, core.CodeInvalidField, "an issuer without names could speak for every host")
	}
	t := template("Coppice egress", now, until)
	t.IsCA, t.BasicConstraintsValid, t.KeyUsage, t.MaxPathLenZero = true, true, x509.KeyUsageCertSign, true
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	t.PermittedDNSDomainsCritical, t.PermittedDNSDomains = true, slices.Clone(names)
	_, none4, _ := net.ParseCIDR("0.0.0.0/0") // excludes every address
	_, none6, _ := net.ParseCIDR("::/0")
	t.ExcludedIPRanges = []*net.IPNet{none4, none6}
	return sign(t, &a)
}

func template(name string, from, until time.Time) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120)) // never fails
	return &x509.Certificate{SerialNumber: serial.Add(serial, big.NewInt(1)), Subject: pkix.Name{CommonName: name}, NotBefore: from.Add(-skew), NotAfter: until}
}

// sign makes a new key and a certificate for it, signed by the parent. Without a parent, the certificate signs itself.
func sign(t *x509.Certificate, parent *Authority) (Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Authority{}, err
	}
	above, signer := t, key
	if parent != nil {
		if above, signer, err = parent.parse(); err != nil {
			return Authority{}, err
		}
	}
	var out Authority
	if out.Certificate, err = x509.CreateCertificate(rand.Reader, t, above, &key.PublicKey, signer); err != nil {
		return Authority{}, err
	}
	out.Key, err = x509.MarshalPKCS8PrivateKey(key)
	return out, err
}

func (a Authority) parse() (*x509.Certificate, *ecdsa.PrivateKey, error) {
	cert, err := x509.ParseCertificate(a.Certificate)
	if err != nil {
		return nil, nil, fmt.Errorf("certificate of an authority: %w", err)
	}
	key, err := x509.ParsePKCS8PrivateKey(a.Key)
	if err != nil {
		return nil, nil, fmt.Errorf("key of an authority: %w", err)
	}
	ec, ok := key.(*ecdsa.PrivateKey)
	if !ok || !ec.PublicKey.Equal(cert.PublicKey) {
		return nil, nil, core.Errorf(core.Invalid, core.CodeInvalidField, "the authority's key does not match its certificate")
	}
	return cert, ec, nil
}

// Leaves makes the certificates of hosts, signed by an issuer, when they are first needed. It is safe for concurrent
// use.
type Leaves struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	now  func() time.Time

	mu     sync.Mutex // guards leaves
	leaves map[string]*tls.Certificate
}

// NewLeaves returns the certificates of an issuer, none of them made yet.
func NewLeaves(issuer Authority) (*Leaves, error) {
	cert, key, err := issuer.parse()
	if err != nil {
		return nil, err
	}
	return &Leaves{cert: cert, key: key, now: time.Now, leaves: map[string]*tls.Certificate{}}, nil
}

// Of returns the certificate of a host, followed by the issuer's certificate.
func (l *Leaves) Of(name string) (*tls.Certificate, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	if c := l.leaves[name]; c != nil && now.Add(LeafTime/2).Before(c.Leaf.NotAfter) {
		return c, nil
	}
	until := now.Add(LeafTime)
	if l.cert.NotAfter.Before(until) {
		until = l.cert.NotAfter
	}
	if !now.Before(until) {
		return nil, core.Errorf(core.FailedPrecondition, core.CodeStateConflict, "the authority that signs for %s has expired", name)
	}
	t := template(name, now, until)
	t.DNSNames, t.KeyUsage, t.ExtKeyUsage, t.BasicConstraintsValid = []string{name}, x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, true
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, t, l.cert, &key.PublicKey, l.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	c := &tls.Certificate{Certificate: [][]byte{der, l.cert.Raw}, PrivateKey: key, Leaf: leaf}
	l.leaves[name] = c
	return c, nil
}
