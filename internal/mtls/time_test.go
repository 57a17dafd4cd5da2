package mtls_test

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mtls"
)

// issued is an identity whose certificate the authority has signed for a time of its own.
func issued(t *testing.T, a *mtls.Authority, name string, from, to time.Time) *mtls.Identity {
	t.Helper()
	der, err := a.Key()
	if err != nil {
		t.Fatal(err)
	}
	signer, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		t.Fatal(err)
	}
	root, err := x509.ParseCertificate(a.Certificate())
	if err != nil {
		t.Fatal(err)
	}
	key, err := mtls.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), DNSNames: []string{name}, NotBefore: from, NotAfter: to, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, BasicConstraintsValid: true,
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, root, key.Public(), signer.(*ecdsa.PrivateKey))
	if err != nil {
		t.Fatal(err)
	}
	i, err := mtls.NewIdentity(a.Certificate(), mtls.Certificate{DER: cert, Key: key})
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// listening answers with "in", and counts the requests that came so far.
func listening(t *testing.T, config *tls.Config) (url string, requests *atomic.Int64) {
	t.Helper()
	requests = new(atomic.Int64)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		requests.Add(1)
		_, _ = w.Write([]byte("in"))
	}))
	s.TLS = config
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.URL, requests
}

// TestOutOfTime: a certificate of the cluster whose time has ended or has not begun opens no connection, at whichever end of whichever of the
// listeners between controllers and runners it is shown. No request gets through in either direction.
func TestOutOfTime(t *testing.T) {
	t.Parallel()
	a := authority(t)
	id, other := core.NewID[core.RunnerID](), core.NewID[core.RunnerID]()
	now := time.Now()
	for name, c := range map[string]struct {
		from, to time.Time
		want     string
	}{
		"good":          {now.Add(-time.Minute), now.Add(time.Hour), "in"},
		"expired":       {now.Add(-4 * time.Minute), now.Add(-2 * time.Second), "CERTIFICATE_REFUSED"},
		"not yet valid": {now.Add(time.Hour), now.Add(2 * time.Hour), "CERTIFICATE_REFUSED"},
	} {
		runner, controller := issued(t, a, mtls.RunnerName(id), c.from, c.to), issued(t, a, mtls.ControllerName, c.from, c.to)
		peer, good := identity(t, a, mtls.RunnerName(other), time.Hour), identity(t, a, mtls.ControllerName, time.Hour)
		for what, x := range map[string]struct{ server, client *tls.Config }{
			"a runner to a controller":                      {good.Server(), runner.Client(mtls.ControllerName)},
			"a runner to a controller that takes joins":     {good.JoinServer(), runner.Client(mtls.ControllerName)},
			"a runner to a runner":                          {peer.Server(), runner.Client(mtls.RunnerName(other))},
			"a controller to a runner":                      {peer.Server(), controller.Client(mtls.RunnerName(other))},
			"the controller that a runner asks":             {controller.Server(), peer.Client(mtls.ControllerName)},
			"the runner that a controller asks":             {runner.Server(), good.Client(mtls.RunnerName(id))},
			"the runner that a runner asks":                 {runner.Server(), peer.Client(mtls.RunnerName(id))},
			"the controller that a runner joins":            {controller.JoinServer(), mtls.JoinClient(a.Pin())},
			"the runner of the data plane that a user asks": {runner.Open(), good.Client(mtls.RunnerName(id))},
		} {
			url, requests := listening(t, x.server)
			if got := ask(t, url, x.client); got != c.want {
				t.Errorf("%s, of %s: %s, want %s", name, what, got, c.want)
			}
			if n := requests.Load(); (n > 0) != (c.want == "in") {
				t.Errorf("%s, of %s: %d requests came through", name, what, n)
			}
		}
	}
}
