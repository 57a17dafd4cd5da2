package daemon_test

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/postgres/durability"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
	"github.com/coppice-dev/coppice/runner/heartbeat"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// say sends a message to a listener between controllers and runners and returns the code of the refusal.
func say(t *testing.T, config *tls.Config, url string, in any) core.Code {
	t.Helper()
	b, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{TLSClientConfig: config}
	defer transport.CloseIdleConnections()
	res, err := (&http.Client{Transport: transport, Timeout: watchdog}).Post(url, "application/json", bytes.NewReader(b))
	if err != nil {
		return core.CodeOf(mtls.Refused(err))
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	var p runnerapi.Problem
	if err := json.Unmarshal(body, &p); err != nil {
		t.Fatalf("%s: %s", res.Status, body)
	}
	return p.Code
}

func load(t *testing.T, m *member) *heartbeat.Member {
	t.Helper()
	out, found, err := heartbeat.Load(filepath.Join(m.cfg.Runner.DataDir, "member.json"))
	if err != nil || !found {
		t.Fatal(found, err)
	}
	return out
}

func at(path string, id core.RunnerID) string { return strings.Replace(path, "{id}", string(id), 1) }

// TestRefusals has a member of the cluster, and strangers, ask for what is not theirs.
func TestRefusals(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	one, two := c.join(nil), c.join(nil)
	mine := load(t, one).Identity
	stranger, err := mtls.NewAuthority("another")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := stranger.IssueNew(mtls.RunnerName(one.ready.RunnerID), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	forged, err := mtls.NewIdentity(stranger.Certificate(), cert)
	if err != nil {
		t.Fatal(err)
	}
	trusting := forged.Client(mtls.ControllerName)
	trusting.InsecureSkipVerify = true
	open := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}
	joining := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13, ServerName: "join.coppice.internal"}
	request := func() []byte {
		key, err := mtls.NewKey()
		if err != nil {
			t.Fatal(err)
		}
		b, err := mtls.Request(key)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	id, other := one.ready.RunnerID, two.ready.RunnerID
	self := mine.Client(mtls.ControllerName)
	for name, q := range map[string]struct {
		config    *tls.Config
		url, path string
		in        any
		want      core.Code
	}{
		"a heartbeat for another runner":        {self, c.ready.Runners, at(runnerapi.PathHeartbeat, other), runnerapi.Heartbeat{LeaseEpoch: 1}, core.CodePermissionDenied},
		"a registration as another runner":      {self, c.ready.Runners, runnerapi.PathRegister, runnerapi.Register{Info: runnerapi.Info{RunnerID: other, Version: runnerapi.Version}, Endpoint: "https://x:1"}, core.CodePermissionDenied},
		"a certificate of another runner":       {self, c.ready.Runners, at(runnerapi.PathRenew, other), runnerapi.Renew{CertificateRequest: request()}, core.CodePermissionDenied},
		"a registration in another version":     {self, c.ready.Runners, runnerapi.PathRegister, runnerapi.Register{Info: runnerapi.Info{RunnerID: id, Version: runnerapi.Version + 1}, Endpoint: "https://x:1"}, core.CodeUnsupported},
		"an endpoint without TLS":               {self, c.ready.Runners, runnerapi.PathRegister, runnerapi.Register{Info: runnerapi.Info{RunnerID: id, Version: runnerapi.Version}, Endpoint: "http://x:1"}, core.CodeInvalidField},
		"a request that is not its sender's":    {self, c.ready.Runners, at(runnerapi.PathRenew, id), runnerapi.Renew{CertificateRequest: []byte("x")}, core.CodeInvalidField},
		"a certificate of another cluster":      {trusting, c.ready.Runners, at(runnerapi.PathHeartbeat, id), runnerapi.Heartbeat{LeaseEpoch: 1}, core.CodeCertificateRefused},
		"no certificate":                        {open, c.ready.Runners, at(runnerapi.PathHeartbeat, id), runnerapi.Heartbeat{LeaseEpoch: 1}, core.CodeCertificateRefused},
		"a runner that works for a runner":      {mine.Client(mtls.RunnerName(other)), two.ready.Endpoint, runnerapi.PathForks, runnerapi.Fork{}, core.CodePermissionDenied},
		"a stranger that works for a runner":    {trusting, two.ready.Endpoint, runnerapi.PathForks, runnerapi.Fork{}, core.CodeCertificateRefused},
		"a join token that is none":             {joining, c.ready.Runners, runnerapi.PathJoin, runnerapi.Join{Token: "cpj_x.y", CertificateRequest: request()}, core.CodeJoinTokenRefused},
		"a join token that was used":            {joining, c.ready.Runners, runnerapi.PathJoin, runnerapi.Join{Token: one.cfg.Runner.JoinToken, CertificateRequest: request()}, core.CodeJoinTokenRefused},
		"a join without a request for its cert": {joining, c.ready.Runners, runnerapi.PathJoin, runnerapi.Join{Token: c.token("")}, core.CodeInvalidField},
	} {
		got := say(t, q.config, q.url+q.path, q.in)
		if got == core.CodeInternal && q.want == core.CodeCertificateRefused {
			continue // the end of the connection has overtaken the reason
		}
		if got != q.want {
			t.Errorf("%s: %s, want %s", name, got, q.want)
		}
	}
	// Whoever joins may do nothing else over that connection.
	if code := status(t, joining, c.ready.Runners+at(runnerapi.PathHeartbeat, id)); code != http.StatusNotFound {
		t.Errorf("a heartbeat over a connection for joining: %d", code)
	}
	if _, err := heartbeat.Join(t.Context(), []string{c.ready.Runners}, "cpj_x."+strings.Repeat("0", 64), filepath.Join(t.TempDir(), "m")); core.CodeOf(err) != core.CodeCertificateRefused {
		t.Errorf("a token of another cluster: %v", err)
	}
	// All of that has not touched the two.
	create(t, c.client)
}

func status(t *testing.T, config *tls.Config, url string) int {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: config}
	defer transport.CloseIdleConnections()
	res, err := (&http.Client{Transport: transport}).Post(url, "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	return res.StatusCode
}

// TestRevoked removes a runner on which a machine runs.
func TestRevoked(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.cfg.Tune.RunnerLease = 9 * time.Second // heartbeats every three
	c.kill()
	c.start()
	r := c.join(nil)
	ws := create(t, c.client)
	id := string(r.ready.RunnerID)
	trust, before := attested(t, c.client, ws.ID)
	wantCode(t, c.client.DeleteRunner(t.Context(), id, false), core.CodeRunnerInUse)
	echo(t, c.client, ws.ID) // nothing has changed
	if err := c.client.DeleteRunner(t.Context(), id, true); err != nil {
		t.Fatal(err)
	}
	if got, err := c.client.Workspace(t.Context(), ws.ID); err != nil || got.State != coppice.WorkspaceLost || got.Failure == nil || got.Failure.Code != string(core.CodeRunnerLost) {
		t.Errorf("%+v, %v", got, err)
	}
	for v, err := range c.client.Runners(t.Context()) {
		t.Errorf("there is still a runner %+v, %v", v, err)
	}
	if status := r.wait(t); status == 0 || !strings.Contains(r.text(t), string(core.CodeRunnerRevoked)) || !strings.Contains(r.text(t), "its sandboxes are ended") {
		t.Errorf("the runner ended with status %d:\n%s", status, r.text(t))
	}
	mine := load(t, r).Identity.Client(mtls.ControllerName)
	for _, path := range []string{at(runnerapi.PathHeartbeat, r.ready.RunnerID), at(runnerapi.PathRenew, r.ready.RunnerID), runnerapi.PathRegister} {
		if code := say(t, mine, c.ready.Runners+path, struct{}{}); code != core.CodeRunnerRevoked {
			t.Errorf("%s of a removed runner: %s", path, code)
		}
	}
	signed := signAs(t, r, before.Statement.Predicate)
	if _, err := trust.VerifyRunner(signed); err != nil {
		t.Errorf("its attestation key is not vouched for, so the test shows nothing: %v", err)
	}
	if _, err := trust.Verify(signed); core.CodeOf(err) != core.CodeAttestationRefused {
		t.Errorf("what a removed runner signs verifies: %v", err)
	}
	attested(t, c.client, ws.ID) // what it made before stays good
	_, err := c.client.CreateRunnerToken(t.Context(), coppice.CreateRunnerTokenRequest{RunnerID: id})
	wantCode(t, err, core.CodeRunnerRevoked)
	_, err = c.client.CreateRunnerToken(t.Context(), coppice.CreateRunnerTokenRequest{RunnerID: string(core.NewID[core.RunnerID]())})
	wantCode(t, err, core.CodeRunnerNotFound)
	// The certificate of a runner whose joining a failover has lost is refused after its removal, too.
	unknown := core.NewID[core.RunnerID]()
	wantCode(t, c.client.DeleteRunner(t.Context(), string(unknown), true), core.CodeRunnerNotFound)
	_, err = c.client.CreateRunnerToken(t.Context(), coppice.CreateRunnerTokenRequest{RunnerID: string(unknown)})
	wantCode(t, err, core.CodeRunnerRevoked)
	if err := c.client.DeleteRunner(t.Context(), id, false); err != nil {
		t.Errorf("a second removal: %v", err)
	}
}

// TestRenewal has certificates that live for half a minute: the runner renews its own, and one that was off for too long says what
// to do and joins again as itself.
func TestRenewal(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.cfg.Tune.RunnerLease, c.cfg.Tune.CertificateLife = 3*time.Second, 24*time.Second // looked at with each heartbeat
	c.kill()
	c.start()
	r := c.join(nil)
	ws := create(t, c.client)
	first := load(t, r).Identity.Leaf()
	until(t, "the certificate is renewed", func() (bool, error) {
		return load(t, r).Identity.Leaf().NotAfter.After(first.NotAfter), nil
	})
	until(t, "the first certificate has expired", func() (bool, error) { return time.Now().After(first.NotAfter), nil })
	echo(t, c.client, ws.ID)
	attested(t, c.client, create(t, c.client).ID) // that of the attestation key is renewed, too
	attested(t, c.client, ws.ID)                  // and what the first one signed is good
	r.kill()
	path := filepath.Join(r.cfg.Runner.DataDir, "member.json")
	until(t, "the certificate has expired", func() (bool, error) {
		_, _, err := heartbeat.Load(path)
		return core.CodeOf(err) == core.CodeCertificateRefused, err
	})
	r.cfg.Runner.JoinToken = ""
	late := begin(t, "runner", r.cfg, nil)
	if status := late.wait(t); status == 0 || !strings.Contains(late.text(t), "coppice runner-token create --runner "+string(r.ready.RunnerID)) {
		t.Errorf("status %d:\n%s", status, late.text(t))
	}
	was := r.ready.RunnerID
	r.cfg.Runner.JoinToken = c.token(string(was))
	r.process = begin(t, "runner", r.cfg, &r.ready)
	if r.ready.RunnerID != was {
		t.Errorf("it came back as %s, was %s", r.ready.RunnerID, was)
	}
	create(t, c.client)
}

// TestConfigurations that must not start.
func TestConfigurations(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	good := daemon.ControllerConfig{Database: testpg.New(t, migrations.Up), Listen: "127.0.0.1:0", RunnerListen: "127.0.0.1:0", KeyFile: filepath.Join(dir, "key"), AllowWeak: durability.Settings()}
	for name, c := range map[string]struct {
		change func(*daemon.ControllerConfig)
		says   string
	}{
		"no TLS for all": {func(c *daemon.ControllerConfig) { c.Listen = "0.0.0.0:0" }, "--plain-http"},
		"no key for all": {func(c *daemon.ControllerConfig) {
			c.PlainHTTP, c.Arrakis = true, daemon.ArrakisConfig{Listen: "0.0.0.0:0", KeyFile: "/absent"}
		}, "need no key there"},
		"ports of Arrakis":    {func(c *daemon.ControllerConfig) { c.Arrakis = daemon.ArrakisConfig{Listen: "127.0.0.1:0", Ports: "x"} }, "--arrakis-ports"},
		"half of TLS":         {func(c *daemon.ControllerConfig) { c.TLSCert = "x" }, "--tls-key"},
		"a negative lease":    {func(c *daemon.ControllerConfig) { c.Tune.RunnerFence = -1 }, "--runner-fence"},
		"no database":         {func(c *daemon.ControllerConfig) { c.Database = "" }, "--database"},
		"no key file":         {func(c *daemon.ControllerConfig) { c.KeyFile = "" }, "--key-file"},
		"an absent database":  {func(c *daemon.ControllerConfig) { c.Database = "postgres://127.0.0.1:1/x" }, "database"},
		"absent certificates": {func(c *daemon.ControllerConfig) { c.TLSCert, c.TLSKey = "/absent", "/absent" }, "/absent"},
	} {
		cfg := good
		c.change(&cfg)
		p := begin(t, "controller", serverConfig{Controller: cfg}, nil)
		if status := p.wait(t); status == 0 || !strings.Contains(p.text(t), c.says) {
			t.Errorf("%s: status %d, want a word of %s:\n%s", name, status, c.says, p.text(t))
		}
	}
	for name, c := range map[string]struct {
		cfg  daemon.RunnerConfig
		says string
	}{
		"no controller":                  {daemon.RunnerConfig{}, "--controller"},
		"a controller, no TLS":           {daemon.RunnerConfig{Controllers: []string{"http://127.0.0.1:1"}, JoinToken: "a.b"}, "https://"},
		"no token":                       {daemon.RunnerConfig{Controllers: []string{"https://127.0.0.1:1"}}, "runner-token create"},
		"a controller that is not there": {daemon.RunnerConfig{Controllers: []string{"https://127.0.0.1:1"}, JoinToken: "a.b"}, string(core.CodeControllerUnreachable)},
		"data without a plane":           {daemon.RunnerConfig{Controllers: []string{"https://127.0.0.1:1"}, DataURL: "https://x"}, "--data-listen"},
	} {
		c.cfg.DataDir, c.cfg.Listen = t.TempDir(), "127.0.0.1:0"
		p := begin(t, "runner", serverConfig{Runner: c.cfg, RunDir: dir}, nil)
		if status := p.wait(t); status == 0 || !strings.Contains(p.text(t), c.says) {
			t.Errorf("%s: status %d, want a word of %s:\n%s", name, status, c.says, p.text(t))
		}
	}
}
