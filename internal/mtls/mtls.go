// Package mtls is the trust between the controllers and runners of one cluster: a private
// authority, certificates with the name of their owner, and TLS configurations that refuse
// everybody else. It uses only TLS 1.3, and both ends show a certificate. An identity is the name
// in a verified certificate, never the content of a message.
package mtls

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Names in certificates. The authority may sign for nothing outside of the domain.
const (
	domain         = "coppice.internal"
	ControllerName = "controller." + domain // every controller
	joinName       = "join." + domain       // what a runner without a certificate asks for
	runnerSuffix   = ".runner." + domain
)

// RunnerName is the name of a runner in its certificate.
func RunnerName(id core.RunnerID) string { return string(id) + runnerSuffix }

// Lifetime is how long a certificate is good for. It is renewed at half of that.
const Lifetime = 24 * time.Hour

// Peer is who is at the other end of a verified connection.
type Peer struct {
	Controller bool
	Runner     core.RunnerID
}

// PeerOf says who sent a request, by the certificate that was verified in the handshake. A connection may outlive its
// certificate, so its time is checked again.
func PeerOf(r *http.Request) (Peer, error) {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 || len(r.TLS.VerifiedChains[0]) == 0 {
		return Peer{}, refused("the request came without a certificate of this cluster")
	}
	leaf := r.TLS.VerifiedChains[0][0]
	if now := time.Now(); now.After(leaf.NotAfter) {
		return Peer{}, refused("the certificate expired at %s; it must be renewed", leaf.NotAfter.Format(time.RFC3339))
	}
	if len(leaf.DNSNames) != 1 {
		return Peer{}, refused("the certificate names %d identities; it must name one", len(leaf.DNSNames))
	}
	name := leaf.DNSNames[0]
	if name == ControllerName {
		return Peer{Controller: true}, nil
	}
	if id, ok := strings.CutSuffix(name, runnerSuffix); ok {
		runner, err := core.ParseID[core.RunnerID](id)
		if err == nil {
			return Peer{Runner: runner}, nil
		}
	}
	return Peer{}, refused("the certificate is for %s, which is neither a controller nor a runner", core.Clip(name))
}

func refused(format string, a ...any) error {
	return core.Errorf(core.Unauthenticated, core.CodeCertificateRefused, format, a...)
}

// Identity is a certificate with its key and the authority that both ends believe. It can be replaced while it is in use:
// connections that are made from then on show the new one.
type Identity struct {
	roots   *x509.CertPool
	current atomic.Pointer[tls.Certificate]
}

// NewIdentity makes an identity out of the authority's certificate and one of its own, both in DER. The certificate must
// be signed by the authority, and be the key's.
func NewIdentity(authority []byte, cert Certificate) (*Identity, error) {
	root, err := x509.ParseCertificate(authority)
	if err != nil {
		return nil, err
	}
	i := &Identity{roots: x509.NewCertPool()}
	i.roots.AddCert(root)
	return i, i.Replace(authority, cert)
}

// Replace shows another certificate from now on.
func (i *Identity) Replace(authority []byte, cert Certificate) error {
	leaf, err := x509.ParseCertificate(cert.DER)
	if err != nil {
		return err
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: i.roots, CurrentTime: leaf.NotBefore, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		return err
	}
	if public, ok := cert.Key.Public().(interface {
		Equal(other crypto.PublicKey) bool
	}); ok && !public.Equal(leaf.PublicKey) {
		return errors.New("the certificate is of another key")
	}
	i.current.Store(&tls.Certificate{Certificate: [][]byte{cert.DER, authority}, PrivateKey: cert.Key, Leaf: leaf})
	return nil
}

// Leaf is the certificate that is shown now.
func (i *Identity) Leaf() *x509.Certificate { return i.current.Load().Leaf }

// RenewAt is half of the certificate's life.
func (i *Identity) RenewAt() time.Time {
	leaf := i.Leaf()
	return leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore) / 2)
}

// Server is the configuration of a listener. Clients must show a certificate of the authority.
func (i *Identity) Server() *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		GetCertificate:         func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return i.current.Load(), nil },
		ClientAuth:             tls.RequireAndVerifyClientCert,
		ClientCAs:              i.roots,
		NextProtos:             []string{"http/1.1"}, // WebSockets are passed on
		SessionTicketsDisabled: true,                 // a resumed session would show an old certificate
	}
}

// Open is the configuration of a listener for users, who have no certificate: what they may do is said by a pass.
func (i *Identity) Open() *tls.Config {
	c := i.Server()
	c.ClientAuth, c.ClientCAs = tls.NoClientCert, nil
	return c
}

// JoinServer is Server, but who asks for the join name need not have a certificate: Joining tells them apart, and they may
// do nothing but join.
func (i *Identity) JoinServer() *tls.Config {
	c := i.Server()
	open := i.Open()
	c.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if hello.ServerName == joinName {
			return open, nil
		}
		return nil, nil //nolint:nilnil // the listener's own
	}
	return c
}

// Joining reports whether a request came over a connection of one who wants to join.
func Joining(r *http.Request) bool { return r.TLS != nil && r.TLS.ServerName == joinName }

// Client is the configuration for connections to the one that name is for.
func (i *Identity) Client(name string) *tls.Config {
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		RootCAs:              i.roots,
		ServerName:           name,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return i.current.Load(), nil },
		NextProtos:           []string{"http/1.1"},
	}
}

// JoinClient is the configuration of a runner that has no certificate yet. It believes a controller whose authority has the
// pin, which came with the join token.
func JoinClient(pin string) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		ServerName:         joinName,
		NextProtos:         []string{"http/1.1"},
		InsecureSkipVerify: true, //nolint:gosec // G402: verified by VerifyConnection, against the pin
		VerifyConnection: func(cs tls.ConnectionState) error {
			for _, c := range cs.PeerCertificates[min(1, len(cs.PeerCertificates)):] {
				if !PinMatches(pin, c.Raw) {
					continue
				}
				roots := x509.NewCertPool()
				roots.AddCert(c)
				_, err := cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: roots, DNSName: ControllerName})
				return err
			}
			return errPin
		},
	}
}

var errPin = errors.New("the server is not of the cluster that the join token is for")

// Refused turns the failure of a handshake, at either end, into a CERTIFICATE_REFUSED that says what to look at. Other
// errors it returns as they are.
func Refused(err error) error {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var host x509.HostnameError
	var verify *tls.CertificateVerificationError
	var alert *net.OpError
	var record tls.RecordHeaderError
	var why string
	switch {
	case errors.As(err, &unknown):
		why = "its certificate is not of this cluster's authority"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		why = "its certificate has expired, or the clocks differ"
	case errors.As(err, &host):
		why = "its certificate is for somebody else"
	case errors.Is(err, errPin):
		why = errPin.Error()
	case errors.As(err, &record):
		why = "it does not speak TLS"
	case errors.As(err, &alert) && alert.Op == "remote error": // as crypto/tls calls what the other end objects to
		why = "it does not take our certificate or TLS version (" + alert.Err.Error() + ")"
	case errors.As(err, &invalid), errors.As(err, &verify):
		why = "its certificate is not valid"
	default:
		return err
	}
	return core.Wrapf(err, core.Unauthenticated, core.CodeCertificateRefused, "the other end is refused: %s", why)
}
