package attest

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/secure-systems-lab/go-securesystemslib/dsse"

	"github.com/coppice-dev/coppice/core"
)

// Names in the certificates of attestation keys. The certificates of TLS have others, and another use: neither is taken for the other.
const (
	ClusterName  = "cluster.attest.coppice.internal" // the countersignature
	runnerSuffix = ".attest.coppice.internal"
)

// RunnerName is the name of a runner in the certificate of its attestation key.
func RunnerName(id core.RunnerID) string { return string(id) + runnerSuffix }

// envelope is a DSSE envelope whose signatures bring their certificates. DSSE has readers ignore fields that they do not know.
type envelope struct {
	PayloadType string      `json:"payloadType"`
	Payload     string      `json:"payload"`
	Signatures  []signature `json:"signatures"`
}

type signature struct {
	KeyID       string `json:"keyid"` // SHA-256 of the certificate
	Sig         string `json:"sig"`
	Certificate []byte `json:"certificate"` // X.509 in DER
}

var errForm = bad("it is not in the form in which it was written: one line of JSON without spaces")

func bad(format string, a ...any) error {
	return core.Errorf(core.Unavailable, core.CodeAttestationRefused, format, a...)
}

// Signer signs with an attestation key.
type Signer struct {
	key  ed25519.PrivateKey
	cert *x509.Certificate
}

// NewKey makes an attestation key.
func NewKey() (ed25519.PrivateKey, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	return key, err
}

// PublicOf is the public part of a key.
func PublicOf(key ed25519.PrivateKey) ed25519.PublicKey {
	public, _ := key.Public().(ed25519.PublicKey) // it always is one
	return public
}

// NewSigner makes a signer of a key and its certificate, in DER.
func NewSigner(key ed25519.PrivateKey, der []byte) (*Signer, error) {
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	if public, ok := cert.PublicKey.(ed25519.PublicKey); !ok || !public.Equal(key.Public()) {
		return nil, errors.New("the certificate is of another attestation key")
	}
	return &Signer{key, cert}, nil
}

// Certificate is the signer's.
func (s *Signer) Certificate() *x509.Certificate { return s.cert }

// Sign makes the envelope of a runner, which the cluster has to countersign.
func (s *Signer) Sign(st Statement) ([]byte, error) {
	if at := st.Predicate.FinishedAt; at.Before(s.cert.NotBefore) || at.After(s.cert.NotAfter) {
		return nil, bad("the certificate of the runner's attestation key is good from %s to %s, and it is %s; compare the clocks of runner and controllers",
			s.cert.NotBefore.Format(time.RFC3339), s.cert.NotAfter.Format(time.RFC3339), at.Format(time.RFC3339))
	}
	if err := st.check(); err != nil {
		return nil, err
	}
	payload, err := encode(st)
	if err != nil {
		return nil, err
	}
	return s.add(envelope{PayloadType: PayloadType}, payload)
}

// Countersign adds the cluster's signature to an envelope that the caller has verified.
func (s *Signer) Countersign(b []byte) ([]byte, error) {
	e, payload, err := open(b, 1)
	if err != nil {
		return nil, err
	}
	return s.add(e, payload)
}

func (s *Signer) add(e envelope, payload []byte) ([]byte, error) {
	signer, err := dsse.NewEnvelopeSigner(edKey{cert: s.cert, key: s.key})
	if err != nil {
		return nil, err
	}
	signed, err := signer.SignPayload(context.Background(), e.PayloadType, payload) // it does no I/O
	if err != nil {
		return nil, err
	}
	e.Payload = signed.Payload
	e.Signatures = append(e.Signatures, signature{KeyID: signed.Signatures[0].KeyID, Sig: signed.Signatures[0].Sig, Certificate: s.cert.Raw})
	b, err := encode(e)
	if err == nil && len(b) > MaxEnvelope {
		err = bad("it has %d bytes; it may have %d", len(b), MaxEnvelope)
	}
	return b, err
}

// open reads an envelope with a number of signatures.
func open(b []byte, signatures int) (envelope, []byte, error) {
	var e envelope
	if len(b) > MaxEnvelope {
		return e, nil, bad("it has %d bytes; it may have %d", len(b), MaxEnvelope)
	}
	if err := decode(b, &e); err != nil {
		return e, nil, err
	}
	switch {
	case e.PayloadType != PayloadType:
		return e, nil, bad("its payload is of the type %q", core.Clip(e.PayloadType))
	case len(e.Signatures) == 1 && signatures == 2:
		return e, nil, bad("the cluster has not countersigned it")
	case len(e.Signatures) != signatures:
		return e, nil, bad("it has %d signatures; it must have %d", len(e.Signatures), signatures)
	}
	strict := base64.StdEncoding.Strict()
	payload, err := strict.DecodeString(e.Payload)
	if err != nil || strings.ContainsAny(e.Payload, "\r\n") {
		return e, nil, errForm
	}
	for _, s := range e.Signatures {
		if sig, err := strict.DecodeString(s.Sig); err != nil || len(sig) != ed25519.SignatureSize || strings.ContainsAny(s.Sig, "\r\n") {
			return e, nil, bad("a signature is not one of Ed25519")
		}
	}
	return e, payload, nil
}

// edKey is an Ed25519 key of a certificate, as the DSSE library wants it.
type edKey struct {
	cert *x509.Certificate
	key  ed25519.PrivateKey // nil to verify
}

var _ dsse.SignerVerifier = edKey{}

func (k edKey) KeyID() (string, error) { return core.DigestOf(k.cert.Raw).Hex(), nil }

func (k edKey) Public() crypto.PublicKey { return k.cert.PublicKey }

func (k edKey) Sign(_ context.Context, data []byte) ([]byte, error) {
	return ed25519.Sign(k.key, data), nil
}

func (k edKey) Verify(_ context.Context, data, sig []byte) error {
	if public, ok := k.cert.PublicKey.(ed25519.PublicKey); !ok || !ed25519.Verify(public, data, sig) {
		return errors.New("the signature is not of this key")
	}
	return nil
}

// Authority verifies what keys of one cluster have signed.
type Authority struct{ roots *x509.CertPool }

// NewAuthority takes the certificate of a cluster's authority, in DER.
func NewAuthority(der []byte) (*Authority, error) {
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	if !cert.IsCA {
		return nil, errors.New("the certificate is not of an authority")
	}
	a := &Authority{roots: x509.NewCertPool()}
	a.roots.AddCert(cert)
	return a, nil
}

// Verified is a statement whose signatures are good.
type Verified struct {
	Statement Statement
	Digest    core.Digest // of the envelope; the audit log has it
}

// Verify takes an envelope that a runner signed and the cluster countersigned. The certificates must be good at the time that the
// statement has: the clock of this machine does not matter.
func (a *Authority) Verify(b []byte) (Verified, error) { return a.verify(b, 2) }

// VerifyRunner verifies an envelope that only a runner has signed, before the cluster countersigns it.
func (a *Authority) VerifyRunner(b []byte) (Verified, error) { return a.verify(b, 1) }

func (a *Authority) verify(b []byte, signatures int) (Verified, error) {
	e, payload, err := open(b, signatures)
	if err != nil {
		return Verified{}, err
	}
	var st Statement
	if err := decode(payload, &st); err != nil {
		return Verified{}, err
	}
	names := []string{RunnerName(st.Predicate.Runner.ID), ClusterName}
	plain := dsse.Envelope{PayloadType: e.PayloadType, Payload: e.Payload}
	keys := make([]dsse.Verifier, len(e.Signatures))
	for i, s := range e.Signatures {
		cert, err := a.certificate(s, names[i], st.Predicate.FinishedAt)
		if err != nil {
			return Verified{}, err
		}
		keys[i] = edKey{cert: cert}
		plain.Signatures = append(plain.Signatures, dsse.Signature{KeyID: s.KeyID, Sig: s.Sig})
	}
	verifier, err := dsse.NewMultiEnvelopeVerifier(signatures, keys...)
	if err != nil {
		return Verified{}, err
	}
	_, signed, err := verifier.VerifyAndDecode(context.Background(), &plain) // it does no I/O
	if err != nil || !bytes.Equal(signed, payload) {
		return Verified{}, core.Wrapf(err, core.Unavailable, core.CodeAttestationRefused, "a signature does not match: the signed content was changed")
	}
	if err := st.check(); err != nil {
		return Verified{}, err
	}
	return Verified{Statement: st, Digest: core.DigestOf(b)}, nil
}

// certificate returns that of a signature, which the authority must have issued for attestations of that name, at that time.
func (a *Authority) certificate(s signature, name string, at time.Time) (*x509.Certificate, error) {
	cert, err := x509.ParseCertificate(s.Certificate)
	if err != nil || core.DigestOf(s.Certificate).Hex() != s.KeyID {
		return nil, bad("a certificate is damaged or not that of its signature")
	}
	_, err = cert.Verify(x509.VerifyOptions{Roots: a.roots, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning}})
	if invalid, ok := errors.AsType[x509.CertificateInvalidError](err); ok && invalid.Reason == x509.Expired {
		return nil, bad("the certificate of %s was not good at %s, when the statement was made", core.Clip(name), at.Format(time.RFC3339))
	}
	if err != nil {
		return nil, core.Wrapf(err, core.Unavailable, core.CodeAttestationRefused, "the authority has not issued the certificate of %s for attestations", core.Clip(name))
	}
	if len(cert.DNSNames) != 1 || cert.DNSNames[0] != name {
		return nil, bad("the certificate is for %s, not for %s", core.Clip(fmt.Sprint(cert.DNSNames)), core.Clip(name))
	}
	return cert, nil
}
