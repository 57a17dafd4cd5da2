package daemon_test

import (
	"crypto/tls"
	"encoding/json"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/mtls"
)

// TestExpiredPeer: the certificate of a runner that has ended opens no connection to another runner or to the controller any more, and a
// connection that was opened while it was good gives nothing. Those who renew theirs go on.
func TestExpiredPeer(t *testing.T) {
	t.Parallel()
	const life = 30 * time.Second // in it a runner starts, and is asked
	store := daemon.StoreConfig{URL: "dir:" + t.TempDir(), CacheSize: 1 << 30}
	c := newClusterOf(t, func(cfg *daemon.ControllerConfig) {
		cfg.Store, cfg.Tune.RunnerLease, cfg.Tune.CertificateLife = store, 3*time.Second, life
	})
	one, two := c.join(func(rc *daemon.RunnerConfig) { rc.Store = store }), c.join(nil)
	two.kill() // it renews nothing from here on
	gone := load(t, two).Identity
	leaf := gone.Leaf()
	object := one.ready.Endpoint + "/v1/objects/v1/none/manifest?offset=0&bytes=10"
	open := &http.Transport{TLSClientConfig: gone.Client(mtls.RunnerName(one.ready.RunnerID)), MaxConnsPerHost: 1}
	defer open.CloseIdleConnections()
	get := func(transport *http.Transport) (int, core.Code, error) {
		res, err := (&http.Client{Transport: transport}).Get(object)
		if err != nil {
			return 0, "", err
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		var p runnerapi.Problem
		_ = json.Unmarshal(b, &p) // what is none has no code
		return res.StatusCode, p.Code, err
	}
	until(t, "the peer admits it while its certificate is good", func() (bool, error) {
		status, _, err := get(open)
		if time.Now().After(leaf.NotAfter) {
			t.Fatal("the certificate expired before the test began")
		}
		return status == http.StatusNotFound, err
	})
	until(t, "the certificate has expired", func() (bool, error) {
		status, code, err := get(open) // the connection stays in use
		expired := time.Now().After(leaf.NotAfter)
		if !expired && (err != nil || status != http.StatusNotFound) && time.Now().Before(leaf.NotAfter) {
			t.Errorf("while it is good: %d %s, %v", status, code, err)
		}
		return expired, nil
	})
	if status, code, err := get(open); err == nil && code != core.CodeCertificateRefused {
		t.Errorf("on an open connection: %d %s", status, code)
	}
	fresh := func(config *tls.Config) *http.Transport {
		return &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}
	}
	if status, code, err := get(fresh(gone.Client(mtls.RunnerName(one.ready.RunnerID)))); err == nil {
		t.Errorf("an expired certificate opens a connection to a runner: %d %s", status, code)
	}
	for _, path := range []string{runnerapi.PathHeartbeat, runnerapi.PathRenew} {
		res, err := (&http.Client{Transport: fresh(gone.Client(mtls.ControllerName))}).Post(c.ready.Runners+at(path, two.ready.RunnerID), "application/json", http.NoBody)
		if err == nil {
			_ = res.Body.Close()
			t.Errorf("an expired certificate opens a connection to a controller for %s: %s", path, res.Status)
		}
	}
	until(t, "a runner that renews its certificate works", func() (bool, error) {
		status, _, err := get(fresh(load(t, one).Identity.Client(mtls.RunnerName(one.ready.RunnerID))))
		return status == http.StatusNotFound, err
	})
	create(t, c.client)
}
