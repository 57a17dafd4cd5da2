package daemon_test

import (
	"crypto/tls"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/mtls"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// value is that of a metric without labels.
func value(t *testing.T, text, name string) int {
	t.Helper()
	found := regexp.MustCompile(`(?m)^` + name + ` (\S+)$`).FindStringSubmatch(text)
	if found == nil {
		t.Fatalf("there is no %s", name)
	}
	f, err := strconv.ParseFloat(found[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return int(f)
}

// TestPeers grows a checkpoint on a second runner, with the first there to give what it sealed: as it is, with bits changed in all that
// it keeps, stopped, and dead. The child is always right.
func TestPeers(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		spoil         func(t *testing.T, first *member)
		served, wrong bool
	}{
		"as it is": {func(*testing.T, *member) {}, true, false},
		"lying":    {func(t *testing.T, first *member) { t.Helper(); spoil(t, first) }, true, true},
		"stopped":  {func(t *testing.T, first *member) { t.Helper(); first.pause(t) }, false, false},
		"dead":     {func(_ *testing.T, first *member) { first.kill() }, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := daemon.StoreConfig{URL: "dir:" + t.TempDir(), CacheSize: 1 << 30}
			c1 := newClusterOf(t, func(cfg *daemon.ControllerConfig) { cfg.Store = store })
			ctx := t.Context()
			first := c1.join(func(rc *daemon.RunnerConfig) { rc.Store = store })
			ws := create(t, c1.client)
			if _, err := c1.client.WriteFile(ctx, ws.ID, "/note", strings.NewReader("kept"), coppice.WriteOptions{}); err != nil {
				t.Fatal(err)
			}
			cp := sealedCheckpoint(t, c1.client, ws.ID)
			second := c1.join(func(rc *daemon.RunnerConfig) { rc.Store, rc.Metrics = store, "127.0.0.1:0" })
			if _, err := c1.client.DrainRunner(ctx, coppice.RunnerID(first.ready.RunnerID), true); err != nil {
				t.Fatal(err)
			}
			c.spoil(t, first)
			forked, err := c1.client.ForkCheckpoint(ctx, cp.ID, coppice.ForkCheckpointRequest{})
			if err != nil {
				t.Fatal(err)
			}
			got, err := c1.client.ReadFile(ctx, forked.Children[0].Workspace.ID, "/note", 100)
			if err != nil || string(got) != "kept" {
				t.Errorf("the child has %q, %v", got, err)
			}
			text := scrape(t, second.ready.Metrics)
			served, wrong := value(t, text, "coppice_peer_bytes_total"), value(t, text, "coppice_peer_wrong_total")
			if served > 0 != c.served || wrong > 0 != c.wrong {
				t.Errorf("%d bytes came from the peer, of %d objects they were wrong", served, wrong)
			}
			if failed := value(t, text, "coppice_peer_failed_total"); failed > 0 == c.served {
				t.Errorf("%d requests failed", failed)
			}
		})
	}
}

// pause stops a process, and waits until every thread of it has.
func (m *member) pause(t *testing.T) {
	t.Helper()
	if err := m.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	until(t, "every thread has stopped", func() (bool, error) {
		stats, err := filepath.Glob("/proc/" + strconv.Itoa(m.cmd.Process.Pid) + "/task/*/stat")
		for _, path := range stats {
			b, err := os.ReadFile(path)
			if _, rest, _ := strings.Cut(string(b), ") "); err != nil || rest[:1] != "T" {
				return false, err
			}
		}
		return len(stats) > 0, err
	})
}

// spoil changes a bit of every object that a runner keeps.
func spoil(t *testing.T, m *member) {
	t.Helper()
	own := filepath.Join(m.cfg.Runner.DataDir, "cache")
	other := filepath.Join(t.TempDir(), "other")
	rot(t, own, other)
	paths, err := filepath.Glob(filepath.Join(other, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		if err := os.Rename(path, filepath.Join(own, filepath.Base(path))); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRemovedRunnerIsRefused removes a runner and keeps its certificate, which is good for a day: other runners give it nothing any more as
// soon as they have heard a controller. Those who show no certificate of the cluster that is good now get no byte at all.
func TestRemovedRunnerIsRefused(t *testing.T) {
	t.Parallel()
	const lease = 6 * time.Second
	files := t.TempDir()
	store := daemon.StoreConfig{URL: "dir:" + files, CacheSize: 1 << 30}
	c := newClusterOf(t, func(cfg *daemon.ControllerConfig) { cfg.Store, cfg.Tune.RunnerLease = store, lease })
	one, two := c.join(func(rc *daemon.RunnerConfig) { rc.Store = store }), c.join(nil)
	thief := load(t, two).Identity
	name := mtls.RunnerName(one.ready.RunnerID)
	url := one.ready.Endpoint + "/v1/objects/v1/none/manifest?offset=0&bytes=10"
	ask := func(config *tls.Config) (int, error) {
		transport := &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}
		res, err := (&http.Client{Transport: transport}).Get(url)
		if err != nil {
			return 0, err
		}
		return res.StatusCode, res.Body.Close()
	}
	until(t, "a member is admitted", func() (bool, error) {
		status, err := ask(thief.Client(name))
		return status == http.StatusNotFound, err
	})
	foreign, err := mtls.NewAuthority("another")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := foreign.IssueNew(mtls.RunnerName(two.ready.RunnerID), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	stranger := thief.Client(name)
	stranger.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return &tls.Certificate{Certificate: [][]byte{cert.DER}, PrivateKey: cert.Key}, nil
	}
	if status, err := ask(stranger); err == nil {
		t.Errorf("a certificate of another authority: %d", status)
	}
	if status, err := ask(thief.Client(mtls.RunnerName(two.ready.RunnerID))); err == nil {
		t.Errorf("a runner of another name was believed: %d", status)
	}
	if err := c.client.DeleteRunner(t.Context(), string(two.ready.RunnerID), true); err != nil {
		t.Fatal(err)
	}
	// By the answer to the next heartbeat. Nothing else refuses it before its certificate ends, and without a word of the controller the answer
	// would be another one.
	until(t, "the removed runner is refused", func() (bool, error) {
		status, err := ask(thief.Client(name))
		return status == http.StatusForbidden, err
	})
	third := load(t, c.join(nil)).Identity
	if status, err := ask(third.Client(name)); err != nil || status != http.StatusNotFound {
		t.Errorf("another runner: %d, %v", status, err)
	}
	c.kill() // without a controller, nobody learns of removals
	until(t, "no runner is admitted", func() (bool, error) {
		status, err := ask(third.Client(name))
		return status == http.StatusServiceUnavailable, err
	})
}

// TestObjectsAreForRunners asks a runner for what it keeps of the store, as a runner of the cluster and as nobody.
func TestObjectsAreForRunners(t *testing.T) {
	t.Parallel()
	files := t.TempDir()
	store := daemon.StoreConfig{URL: "dir:" + files, CacheSize: 1 << 30}
	c := newClusterOf(t, func(cfg *daemon.ControllerConfig) { cfg.Store = store })
	one, two := c.join(func(rc *daemon.RunnerConfig) { rc.Store = store }), c.join(nil)
	if _, err := c.client.DrainRunner(t.Context(), coppice.RunnerID(two.ready.RunnerID), true); err != nil {
		t.Fatal(err)
	}
	cp := sealedCheckpoint(t, c.client, create(t, c.client).ID)
	manifests, err := filepath.Glob(filepath.Join(files, "v1", "*", cp.ID, "*", "manifest"))
	if err != nil || len(manifests) != 1 {
		t.Fatalf("%q, %v", manifests, err)
	}
	key, err := filepath.Rel(files, manifests[0])
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(manifests[0])
	if err != nil {
		t.Fatal(err)
	}
	config := load(t, two).Identity.Client(mtls.RunnerName(one.ready.RunnerID))
	transport := &http.Transport{TLSClientConfig: config}
	t.Cleanup(transport.CloseIdleConnections)
	for path, status := range map[string]int{
		"/v1/objects/" + key + "?offset=3&bytes=10":            http.StatusOK,
		"/v1/objects/" + key + "x?offset=3&bytes=10":           http.StatusNotFound,
		"/v1/objects/" + key + "?offset=3&bytes=100000000":     http.StatusNotFound,
		"/v1/objects/" + key + "?offset=-3&bytes=10":           http.StatusNotFound,
		"/v1/objects/" + key + "?offset=3":                     http.StatusBadRequest,
		"/v1/objects/..%2f..%2fcheckpoints/x?offset=0&bytes=1": http.StatusNotFound,
		"/v1/checkpoints":                                    http.StatusForbidden,
		"/v1/info?offset=3&bytes=10":                         http.StatusForbidden,
		"/v1/checkpoints/" + cp.ID + "/../../objects/" + key: http.StatusTemporaryRedirect, // to what a runner may ask for
	} {
		res, err := (&http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}).Get(one.ready.Endpoint + path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if err != nil || res.StatusCode != status || status == http.StatusOK && string(b) != string(want[3:13]) {
			t.Errorf("%s: %s, %q, %v", path, res.Status, b, err)
		}
	}
	config.GetClientCertificate = nil
	if res, err := (&http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}}).Get(one.ready.Endpoint + "/v1/objects/" + key + "?offset=3&bytes=10"); err == nil {
		_ = res.Body.Close()
		t.Errorf("without a certificate: %s", res.Status)
	}
}
