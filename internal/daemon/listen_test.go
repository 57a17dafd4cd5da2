package daemon

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/internalapi"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/runner/heartbeat"
	runnerhttp "github.com/coppice-dev/coppice/runner/httpapi"
)

// TestNothingWithoutTLS puts together what must not be: listeners, clients and handlers without a certificate.
func TestNothingWithoutTLS(t *testing.T) {
	t.Parallel()
	log := slog.New(slog.DiscardHandler)
	for name, config := range map[string]*tls.Config{"none": nil, "one without a certificate": {MinVersion: tls.VersionTLS13}} {
		if l, err := listenTLS(t.Context(), "127.0.0.1:0", "listen", config, http.NotFoundHandler(), log); err == nil {
			t.Errorf("a listener with %s as its TLS configuration", name)
			_ = l.close()
		}
	}
	if _, err := runnerclient.NewTLS(nil); err == nil {
		t.Error("a way to runners without a certificate")
	}
	if _, err := heartbeat.New(nil, heartbeat.Config{Controllers: []string{"https://x:1"}}); err == nil {
		t.Error("a way to controllers without a certificate or a secret")
	}
	if _, err := internalapi.New(nil, "", log); err == nil {
		t.Error("a listener for runners without a secret")
	}
	if _, err := runnerhttp.New(nil, nil, "", log); err == nil {
		t.Error("a runner's API without a secret")
	}
	for name, h := range map[string]http.Handler{"the controller's": internalapi.NewTLS(nil, log), "the runner's": runnerhttp.NewTLS(nil, nil, runnerhttp.NewPeers(), log)} {
		for _, path := range []string{runnerapi.PathRegister, runnerapi.PathJoin, runnerapi.PathInfo} {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, path, nil))
			var p runnerapi.Problem
			if err := json.NewDecoder(w.Body).Decode(&p); err != nil || w.Code != http.StatusUnauthorized || p.Code != core.CodeCertificateRefused {
				t.Errorf("%s handler without TLS, %s: %d %+v, %v", name, path, w.Code, p, err)
			}
		}
	}
}

func TestLoopback(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]bool{
		"127.0.0.1:1": true, "127.9.9.9:1": true, "[::1]:1": true, "localhost:1": true,
		"0.0.0.0:1": false, ":1": false, "[::]:1": false, "10.0.0.1:1": false, "localhost.example:1": false, "": false,
	} {
		if got := loopback(address); got != want {
			t.Errorf("%q: %v", address, got)
		}
	}
}

// TestCertFile replaces a certificate under a server, half of it first.
func TestCertFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	write := func(name string, half bool) {
		a, err := mtls.NewAuthority("test")
		if err != nil {
			t.Fatal(err)
		}
		made, err := a.IssueNew(name, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		secret, err := x509.MarshalPKCS8PrivateKey(made.Key)
		if err != nil {
			t.Fatal(err)
		}
		for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: made.DER}, key: {Type: "PRIVATE KEY", Bytes: secret}} {
			if half && path == key {
				continue
			}
			if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	write("one.coppice.internal", false)
	c, err := openCertFile(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	shown := func() string {
		c.mu.Lock()
		c.read = time.Time{} // as if time had passed
		c.mu.Unlock()
		got, err := c.get(nil)
		if err != nil {
			t.Fatal(err)
		}
		return got.Leaf.Subject.CommonName
	}
	later := time.Now().Add(time.Minute)
	write("two.coppice.internal", true)
	if err := os.Chtimes(cert, later, later); err != nil {
		t.Fatal(err)
	}
	if got := shown(); got != "one.coppice.internal" {
		t.Errorf("with half of a new pair: %s", got)
	}
	write("three.coppice.internal", false)
	if err := os.Chtimes(cert, later.Add(time.Minute), later); err != nil {
		t.Fatal(err)
	}
	if got := shown(); got != "three.coppice.internal" {
		t.Errorf("with a whole one: %s", got)
	}
}
