package mtls_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

func authority(t *testing.T) *mtls.Authority {
	t.Helper()
	a, err := mtls.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func identity(t *testing.T, a *mtls.Authority, name string, life time.Duration) *mtls.Identity {
	t.Helper()
	cert, err := a.IssueNew(name, life)
	if err != nil {
		t.Fatal(err)
	}
	i, err := mtls.NewIdentity(a.Certificate(), cert)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// server says who asks.
func server(t *testing.T, config *tls.Config) string {
	t.Helper()
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if mtls.Joining(r) {
			_, _ = io.WriteString(w, "joining")
			return
		}
		p, err := mtls.PeerOf(r)
		switch {
		case err != nil:
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = io.WriteString(w, string(core.CodeOf(err)))
		case p.Controller:
			_, _ = io.WriteString(w, "controller")
		default:
			_, _ = io.WriteString(w, string(p.Runner))
		}
	}))
	s.TLS = config
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.URL
}

// ask returns what a server answers, or the code of the refusal.
func ask(t *testing.T, url string, config *tls.Config) string {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: config}
	defer transport.CloseIdleConnections()
	res, err := (&http.Client{Transport: transport, Timeout: time.Minute}).Get(url)
	// The end of the connection may overtake the reason.
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, io.EOF) {
		return "CERTIFICATE_REFUSED"
	}
	if err != nil {
		return string(core.CodeOf(mtls.Refused(err)))
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestWhoGetsIn(t *testing.T) {
	t.Parallel()
	ours, theirs := authority(t), authority(t)
	id := core.NewID[core.RunnerID]()
	controller := identity(t, ours, mtls.ControllerName, time.Hour)
	runner := identity(t, ours, mtls.RunnerName(id), time.Hour)
	url := server(t, controller.Server())
	old := func(c *tls.Config) *tls.Config {
		c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
		return c
	}
	bare := runner.Client(mtls.ControllerName)
	bare.GetClientCertificate = nil
	for name, c := range map[string]struct {
		config *tls.Config
		want   string
	}{
		"a runner":                     {runner.Client(mtls.ControllerName), string(id)},
		"a controller":                 {controller.Client(mtls.ControllerName), "controller"},
		"of another cluster":           {identity(t, theirs, mtls.RunnerName(id), time.Hour).Client(mtls.ControllerName), "CERTIFICATE_REFUSED"},
		"expired":                      {identity(t, ours, mtls.RunnerName(id), -time.Second).Client(mtls.ControllerName), "CERTIFICATE_REFUSED"},
		"no certificate":               {bare, "CERTIFICATE_REFUSED"},
		"expecting somebody else":      {runner.Client(mtls.RunnerName(id)), "CERTIFICATE_REFUSED"},
		"TLS 1.2":                      {old(runner.Client(mtls.ControllerName)), "CERTIFICATE_REFUSED"},
		"a name that is nobody's":      {identity(t, ours, "x.coppice.internal", time.Hour).Client(mtls.ControllerName), "CERTIFICATE_REFUSED"},
		"an id that is none":           {identity(t, ours, "rnr_x.runner.coppice.internal", time.Hour).Client(mtls.ControllerName), "CERTIFICATE_REFUSED"},
		"joining where nobody can":     {mtls.JoinClient(ours.Pin()), "CERTIFICATE_REFUSED"},
		"a certificate that is mended": {mended(t, ours, id), string(id)},
	} {
		if got := ask(t, url, c.config); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	evil, err := ours.IssueNew("evil.example", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := mtls.NewIdentity(ours.Certificate(), evil); err == nil {
		t.Error("the authority can sign for names outside of its domain")
	}
}

// mended is an identity whose expired certificate was replaced.
func mended(t *testing.T, a *mtls.Authority, id core.RunnerID) *tls.Config {
	t.Helper()
	i := identity(t, a, mtls.RunnerName(id), -time.Second)
	config := i.Client(mtls.ControllerName)
	cert, err := a.IssueNew(mtls.RunnerName(id), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if err := i.Replace(a.Certificate(), cert); err != nil {
		t.Fatal(err)
	}
	return config
}

func TestJoinListener(t *testing.T) {
	t.Parallel()
	ours, theirs := authority(t), authority(t)
	id := core.NewID[core.RunnerID]()
	url := server(t, identity(t, ours, mtls.ControllerName, time.Hour).JoinServer())
	if got := ask(t, url, mtls.JoinClient(ours.Pin())); got != "joining" {
		t.Errorf("the right pin: %s", got)
	}
	for name, config := range map[string]*tls.Config{
		"the pin of another cluster": mtls.JoinClient(theirs.Pin()),
		"no pin":                     mtls.JoinClient(""),
	} {
		if got := ask(t, url, config); got != "CERTIFICATE_REFUSED" {
			t.Errorf("%s: %s", name, got)
		}
	}
	// The pin is of the authority, and a runner that it has signed for is no controller.
	rogue := server(t, identity(t, ours, mtls.RunnerName(id), time.Hour).JoinServer())
	if got := ask(t, rogue, mtls.JoinClient(ours.Pin())); got != "CERTIFICATE_REFUSED" {
		t.Errorf("a runner that plays controller: %s", got)
	}
	// Whoever asks for another name needs a certificate there, too.
	bare := identity(t, ours, mtls.RunnerName(id), time.Hour).Client(mtls.ControllerName)
	bare.GetClientCertificate = nil
	if got := ask(t, url, bare); got != "CERTIFICATE_REFUSED" {
		t.Errorf("no certificate: %s", got)
	}
}

// TestExpiryOnAnOpenConnection lets a certificate expire while its connection is open.
func TestExpiryOnAnOpenConnection(t *testing.T) {
	t.Parallel()
	ours := authority(t)
	id := core.NewID[core.RunnerID]()
	url := server(t, identity(t, ours, mtls.ControllerName, time.Hour).Server())
	open := func(life time.Duration) *http.Client {
		return &http.Client{Transport: &http.Transport{TLSClientConfig: identity(t, ours, mtls.RunnerName(id), life).Client(mtls.ControllerName)}}
	}
	get := func(c *http.Client) (string, error) {
		res, err := c.Get(url)
		if err != nil {
			return "", err
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		return string(b), err
	}
	life := 1500 * time.Millisecond
	client := open(life)
	for got, err := get(client); err != nil || got != string(id); got, err = get(client) { // it expired before it was used
		client.CloseIdleConnections()
		if life *= 2; life > time.Minute {
			t.Fatal(got, err)
		}
		client = open(life)
	}
	defer client.CloseIdleConnections()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for began := time.Now(); time.Since(began) < life+20*time.Second; <-tick.C {
		got, err := get(client)
		if err != nil {
			t.Fatal(err)
		}
		if got == "CERTIFICATE_REFUSED" {
			return
		}
	}
	t.Error("an expired certificate is taken on a connection that stays open")
}

func TestAuthorityIsKept(t *testing.T) {
	t.Parallel()
	a := authority(t)
	key, err := a.Key()
	if err != nil {
		t.Fatal(err)
	}
	again, err := mtls.LoadAuthority(a.Certificate(), key)
	if err != nil || again.Pin() != a.Pin() {
		t.Fatal(err)
	}
	if _, err := mtls.LoadAuthority(authority(t).Certificate(), key); err == nil {
		t.Error("the certificate of another authority is taken")
	}
	cert, err := again.IssueNew(mtls.ControllerName, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	other, err := mtls.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := mtls.NewIdentity(a.Certificate(), mtls.Certificate{DER: cert.DER, Key: other}); err == nil {
		t.Error("a certificate of another key is taken")
	}
}

func TestRequest(t *testing.T) {
	t.Parallel()
	key, err := mtls.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	request, err := mtls.Request(key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := mtls.Requested(request); err != nil {
		t.Error(err)
	}
	broken := append([]byte(nil), request...)
	broken[len(broken)-1] ^= 1
	for name, b := range map[string][]byte{"empty": nil, "nonsense": []byte("x"), "not its holder's": broken, "large": make([]byte, 20<<10)} {
		if _, err := mtls.Requested(b); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzRequested(f *testing.F) {
	key, err := mtls.NewKey()
	if err != nil {
		f.Fatal(err)
	}
	request, err := mtls.Request(key)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(request)
	f.Fuzz(func(t *testing.T, b []byte) {
		if public, err := mtls.Requested(b); err == nil && public == nil {
			t.Error("no key and no error")
		}
	})
}

// TestAttestationKeys: a certificate of an attestation key opens no connection, and is given for keys of Ed25519 only.
func TestAttestationKeys(t *testing.T) {
	t.Parallel()
	a := authority(t)
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	request, err := mtls.Request(key)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := mtls.RequestedAttestation(request); err != nil || !got.Equal(public) {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := mtls.Requested(request); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("a certificate for TLS of an attestation key: %v", err)
	}
	tlsKey, err := mtls.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	if request, err = mtls.Request(tlsKey); err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"of TLS": request, "empty": nil, "large": make([]byte, 20<<10)} {
		if _, err := mtls.RequestedAttestation(b); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%s: %v", name, err)
		}
	}
	id := core.NewID[core.RunnerID]()
	der, err := a.IssueAttestation(public, mtls.RunnerName(id), 0, time.Hour) // even if it had the name of one that may
	if err != nil {
		t.Fatal(err)
	}
	i, err := mtls.NewIdentity(a.Certificate(), mtls.Certificate{DER: der, Key: key})
	if err != nil {
		t.Fatal(err)
	}
	url := server(t, identity(t, a, mtls.ControllerName, time.Hour).Server())
	if got := ask(t, url, i.Client(mtls.ControllerName)); got != "CERTIFICATE_REFUSED" {
		t.Errorf("with an attestation key one gets in as %s", got)
	}
}
