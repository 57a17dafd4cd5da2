package grant

import (
	"crypto/ecdh"
	"crypto/hpke"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/ca"
	"github.com/coppice-dev/coppice/egress/policy"
)

// Bundle is everything that a proxy needs to serve the grants of a sandbox.
type Bundle struct {
	Grants []Grant
	Issuer *ca.Authority // signs for the hosts of grants in [ModeHeader]; nil when there are none
}

// wire is a bundle in the form that is encrypted.
type wire struct {
	Grants []wireGrant   `json:"grants"`
	Issuer *ca.Authority `json:"issuer,omitempty"`
}

type wireGrant struct {
	ID          string    `json:"id"`
	Mode        Mode      `json:"mode"`
	Placeholder string    `json:"placeholder"`
	Secret      string    `json:"secret"`
	Targets     []string  `json:"targets"` // host:port
	Header      string    `json:"header"`
	Methods     []string  `json:"methods,omitempty"`
	Paths       []string  `json:"paths,omitempty"`
	Expires     time.Time `json:"expires,omitzero"`
	MaxBytes    int64     `json:"max_bytes,omitempty"`
	PerMinute   int       `json:"per_minute,omitempty"`
}

// suite is the encryption of bundles (RFC 9180): X25519, HKDF-SHA256, ChaCha20-Poly1305.
func suite() (hpke.KDF, hpke.AEAD) { return hpke.HKDFSHA256(), hpke.ChaCha20Poly1305() }

// about binds an encrypted bundle to its sandbox and the version of its rules.
func about(id core.SandboxID, version int64) []byte {
	return fmt.Appendf(nil, "coppice grants 1\x00%s\x00%d", id, version)
}

// Keys decrypt the bundles of a proxy. Each start of the proxy makes new ones, and they exist only in its memory.
type Keys struct{ private hpke.PrivateKey }

// NewKeys makes keys.
func NewKeys() (*Keys, error) {
	k, err := hpke.DHKEM(ecdh.X25519()).GenerateKey()
	if err != nil {
		return nil, err
	}
	return &Keys{k}, nil
}

// Public returns the public key, for which others encrypt bundles.
func (k *Keys) Public() []byte { return k.private.PublicKey().Bytes() }

// Encrypt encrypts a bundle, so that only the holder of the keys can read it, and only for one version of one sandbox's
// rules.
func Encrypt(public []byte, id core.SandboxID, version int64, b Bundle) ([]byte, error) {
	key, err := hpke.DHKEM(ecdh.X25519()).NewPublicKey(public)
	if err != nil {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "the key of an egress proxy cannot be read: %v", err)
	}
	w := wire{Issuer: b.Issuer}
	for _, g := range b.Grants {
		w.Grants = append(w.Grants, wireOf(g))
	}
	text, err := marshal(w)
	if err != nil {
		return nil, err
	}
	kdf, aead := suite()
	return hpke.Seal(key, kdf, aead, about(id, version), text)
}

func wireOf(g Grant) wireGrant {
	x := wireGrant{
		ID: g.ID, Mode: g.Mode, Placeholder: g.Placeholder, Secret: g.Secret.Reveal(), Header: g.Header, Methods: g.Methods, Paths: g.Paths,
		Expires: g.Expires, MaxBytes: g.MaxBytes, PerMinute: g.PerMinute,
	}
	for _, t := range g.Targets {
		x.Targets = append(x.Targets, policy.JoinHostPort(t.Host, t.Port))
	}
	return x
}

// Decrypt decrypts a bundle that was encrypted for these keys and for that version of that sandbox's rules.
func (k *Keys) Decrypt(encrypted []byte, id core.SandboxID, version int64) (Bundle, error) {
	kdf, aead := suite()
	text, err := hpke.Open(k.private, kdf, aead, about(id, version), encrypted)
	if err != nil {
		return Bundle{}, core.Errorf(core.FailedPrecondition, core.CodeStateConflict, "grants of %s at version %d are not encrypted for this proxy: %v", id, version, err)
	}
	var w wire
	if err := json.Unmarshal(text, &w); err != nil {
		return Bundle{}, errors.New("a bundle of grants cannot be read") // the error could quote a secret
	}
	out := Bundle{Issuer: w.Issuer}
	for _, g := range w.Grants {
		o, err := g.grant()
		if err != nil {
			return Bundle{}, err
		}
		out.Grants = append(out.Grants, o)
	}
	return out, nil
}

func (g wireGrant) grant() (Grant, error) {
	out := Grant{
		ID: g.ID, Mode: g.Mode, Placeholder: g.Placeholder, Secret: NewSecret(g.Secret), Header: http.CanonicalHeaderKey(g.Header), Methods: g.Methods,
		Paths: g.Paths, Expires: g.Expires, MaxBytes: g.MaxBytes, PerMinute: g.PerMinute,
	}
	for _, s := range g.Targets {
		h, port, err := policy.ParseHostPort(s)
		if err != nil {
			return Grant{}, err
		}
		out.Targets = append(out.Targets, Target{h, port})
	}
	modes := []Mode{ModeHeader, ModeBaseURL}
	if len(out.Targets) == 0 || len(g.Placeholder) <= len(Prefix) || len(g.Secret) < MinSecret || g.Header == "" || !slices.Contains(modes, g.Mode) {
		return Grant{}, core.Errorf(core.Invalid, core.CodeInvalidField, "the grant %s lacks a host, a header, a mode, a placeholder or a secret", g.ID)
	}
	return out, nil
}
