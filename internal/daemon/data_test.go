package daemon_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/daemon"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// plane is a runner's data plane as somebody with a pass sees it.
type plane struct {
	t    *testing.T
	http *http.Client
}

// ask sends a request with a pass and returns the status.
func (p plane) ask(method string, pass coppice.DataPass, query, token string) int {
	p.t.Helper()
	req, err := http.NewRequestWithContext(p.t.Context(), method, pass.URL+"?"+query, strings.NewReader(""))
	if err != nil {
		p.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	res, err := p.http.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		p.t.Fatal(err)
	}
	return res.StatusCode
}

// TestDataPlane carries streams and files straight to the runner, past a controller that is not there any more.
func TestDataPlane(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	r := c.join(func(cfg *daemon.RunnerConfig) { cfg.DataListen = "127.0.0.1:0" })
	ws := create(t, c.client)
	session, err := c.client.StartSession(t.Context(), ws.ID, coppice.ExecRequest{Command: []string{"cat"}, StdinOpen: true})
	if err != nil {
		t.Fatal(err)
	}
	attached, err := c.client.Attach(t.Context(), session.ID, coppice.AttachOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer attached.Close()
	pass, err := c.client.FilesPass(t.Context(), ws.ID)
	if err != nil || !strings.HasPrefix(pass.URL, r.ready.DataURL) || pass.TLS.Authority == "" {
		t.Fatalf("%+v, %v", pass, err)
	}
	content := bytes.Repeat([]byte("data plane "), 20_000)
	if _, err := c.client.WriteFile(t.Context(), ws.ID, "/file", bytes.NewReader(content), coppice.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	uses := func() int { return strings.Count(r.text(t), `msg="pass used"`) }
	if n := uses(); n != 2 {
		t.Errorf("%d passes were used, want one for the terminal and one for the file", n)
	}

	c.kill() // and the bytes go on
	speak(t, attached, "without a controller\n")
	if b, err := c.client.ReadFile(t.Context(), ws.ID, "/file", 1<<20); err != nil || !bytes.Equal(b, content) {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	c.start()
	testPasses(t, c, r, ws, session.ID)
}

func speak(t *testing.T, a *coppice.Attached, text string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), watchdog)
	defer cancel()
	if err := a.Write(ctx, []byte(text)); err != nil {
		t.Fatal(err)
	}
	var got []byte
	for !bytes.Equal(got, []byte(text)) {
		e, err := a.Next(ctx)
		if err != nil {
			t.Fatalf("%q so far: %v", got, err)
		}
		got = append(got, e.Data...)
	}
}

// testPasses uses passes for what they are not for.
func testPasses(t *testing.T, c *cluster, r *member, ws coppice.Workspace, session coppice.SessionID) {
	t.Helper()
	p := plane{t, &http.Client{Transport: &http.Transport{TLSClientConfig: load(t, r).Identity.Client("")}}}
	p.http.Transport.(*http.Transport).TLSClientConfig.ServerName = string(r.ready.RunnerID) + ".runner.coppice.internal"
	defer p.http.CloseIdleConnections()
	pass, err := c.client.FilesPass(t.Context(), ws.ID)
	if err != nil {
		t.Fatal(err)
	}
	forked, err := c.client.ForkWorkspace(t.Context(), ws.ID, coppice.ForkWorkspaceRequest{})
	if err != nil {
		t.Fatal(err)
	}
	child, err := c.client.FilesPass(t.Context(), forked.Children[0].Workspace.ID)
	if err != nil {
		t.Fatal(err)
	}
	for name, q := range map[string]struct {
		query, token string
		want         int
	}{
		"a file":                   {"path=/file&stat=true", pass.Token, 200},
		"the fork's file":          {"path=/file&stat=true", child.Token, 200},
		"no pass":                  {"path=/file", "", 401},
		"an API key":               {"path=/file", "coppice_" + strings.Repeat("0", 64), 401},
		"an unknown parameter":     {"path=/file&x=1", pass.Token, 400},
		"a pass that is changed":   {"path=/file", pass.Token[:len(pass.Token)-6] + "AAAAAA", 401},
		"a pass in the address":    {"path=/file&token=" + pass.Token, "", 401},
		"an absent file":           {"path=/absent", pass.Token, 404},
		"the pass of another kind": {"path=/file", attachToken(t, c, session), 401},
	} {
		if got := p.ask(http.MethodGet, pass, q.query, q.token); got != q.want {
			t.Errorf("%s: %d, want %d", name, got, q.want)
		}
	}
	health := pass
	health.URL = r.ready.DataURL + "/healthz"
	if got := p.ask(http.MethodGet, health, "", ""); got != 200 {
		t.Errorf("the health check: %d", got)
	}
	for _, path := range []string{"/v1/forks", "/v1/info", "/v1/sandboxes", "/internal/v1/join"} {
		inner := pass
		inner.URL = r.ready.DataURL + path
		if got := p.ask(http.MethodGet, inner, "", pass.Token); got != 404 {
			t.Errorf("%s on the data plane: %d", path, got)
		}
	}

	// A restore in place ends the epoch: old passes are dead, and the client gets another by itself.
	cp, err := c.client.CreateCheckpoint(t.Context(), ws.ID, coppice.CreateCheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	stale := attachToken(t, c, session)
	if _, err := c.client.RestoreWorkspace(t.Context(), ws.ID, cp.ID); err != nil {
		t.Fatal(err)
	}
	if got := p.ask(http.MethodGet, pass, "path=/file", pass.Token); got != 401 {
		t.Errorf("a pass from before the restore: %d", got)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.ready.DataURL+"/v1/data/attach?token="+stale, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "websocket")
	res, err := p.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	if res.StatusCode != http.StatusUnauthorized {
		t.Errorf("an attach token from before the restore: %d", res.StatusCode)
	}
	before := strings.Count(r.text(t), `msg="pass used"`)
	if _, err := c.client.WriteFile(t.Context(), ws.ID, "/again", strings.NewReader("x"), coppice.WriteOptions{}); err != nil {
		t.Error(err)
	}
	if strings.Count(r.text(t), `msg="pass used"`) == before {
		t.Error("after the restore the client does not use the data plane")
	}
	_, err = c.client.Attach(t.Context(), session, coppice.AttachOptions{})
	if !errors.Is(err, coppice.Code(core.CodeSessionNotFound)) {
		t.Errorf("a session from before the restore: %v", err)
	}
}

func attachToken(t *testing.T, c *cluster, session coppice.SessionID) string {
	t.Helper()
	way, err := c.client.AttachGrant(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	return way.Token
}

// TestDataPlaneAway has a runner name an address that nobody reaches: the bytes go through the controller.
func TestDataPlaneAway(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.join(func(cfg *daemon.RunnerConfig) { cfg.DataListen, cfg.DataURL = "127.0.0.1:0", "https://127.0.0.1:1" })
	ws := create(t, c.client)
	if _, err := c.client.WriteFile(t.Context(), ws.ID, "/file", strings.NewReader("by another way"), coppice.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	session, err := c.client.StartSession(t.Context(), ws.ID, coppice.ExecRequest{Command: []string{"cat"}, StdinOpen: true})
	if err != nil {
		t.Fatal(err)
	}
	a, err := c.client.Attach(t.Context(), session.ID, coppice.AttachOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	speak(t, a, "by another way\n")
}

// TestRevokedKeyOnTheDataPlane revokes the key that asked for passes: what was begun with it ends, though the controller carries none
// of it, and its passes are dead.
func TestRevokedKeyOnTheDataPlane(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.cfg.Tune.RunnerLease = 3 * time.Second // heartbeats every second
	c.kill()
	c.start()
	r := c.join(func(cfg *daemon.RunnerConfig) { cfg.DataListen = "127.0.0.1:0" })
	ws := create(t, c.client)
	self, err := c.client.Self(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	made, err := c.client.CreateKey(t.Context(), self.ProjectID, coppice.CreateKeyRequest{Name: "short-lived", Scopes: []coppice.KeyScope{"workspace:exec", "workspace:read"}})
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := coppice.New(coppice.Config{Server: c.ready.Server, Token: made.Secret})
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	attach := func(client *coppice.Client) *coppice.Attached {
		session, err := client.StartSession(t.Context(), ws.ID, coppice.ExecRequest{Command: []string{"cat"}, StdinOpen: true})
		if err != nil {
			t.Fatal(err)
		}
		a, err := client.Attach(t.Context(), session.ID, coppice.AttachOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	a, ours := attach(theirs), attach(c.client)
	defer a.Close()
	defer ours.Close()
	speak(t, a, "before\n")
	pass, err := theirs.FilesPass(t.Context(), ws.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.client.RevokeKey(t.Context(), made.Key.ID); err != nil {
		t.Fatal(err)
	}
	late, cancel := context.WithTimeout(t.Context(), watchdog) // the pass is good for longer
	defer cancel()
	for {
		if _, err = a.Next(late); err != nil {
			break
		}
	}
	if late.Err() != nil {
		t.Error("the terminal goes on without its key")
	}
	p := plane{t, &http.Client{Transport: &http.Transport{TLSClientConfig: load(t, r).Identity.Client(string(r.ready.RunnerID) + ".runner.coppice.internal")}}}
	defer p.http.CloseIdleConnections()
	if got := p.ask(http.MethodGet, pass, "path=/&stat=true", pass.Token); got != 401 {
		t.Errorf("a pass of the revoked key: %d", got)
	}
	speak(t, ours, "another key's terminal goes on\n")
}
