package httpapi_test

import (
	"net/http"
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/core"
)

// TestJoinKey is who has stolen the key that is on every node: it makes tokens for new runners, and none for a runner that lives.
func TestJoinKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	join := w.newKey("join", core.ScopeRunnerJoin).Secret
	id := string(core.NewID[core.RunnerID]())
	w.sql(`INSERT INTO runner_identities (runner_id) VALUES ($1)`, id)
	ask := func(key, body string) reply {
		return w.do(call{method: "POST", path: "/v1/runner-tokens", body: body, key: key})
	}
	named := `{"runner_id":"` + id + `"}`
	if got := ask(join, `{}`); got.status != http.StatusCreated {
		t.Errorf("for a new runner: %d %s", got.status, got.body)
	}
	if got := ask(join, named); got.status != http.StatusForbidden {
		t.Errorf("for a runner that has just joined: %d %s", got.status, got.body)
	}
	if got := ask(apiKey, named); got.status != http.StatusCreated {
		t.Errorf("an administrator, for a runner that has lost its certificate: %d %s", got.status, got.body)
	}
	w.sql(`UPDATE runner_identities SET joined_at = now() - interval '25 hours' WHERE runner_id = $1`, id)
	if got := ask(join, named); got.status != http.StatusCreated {
		t.Errorf("for a runner that was off for a day: %d %s", got.status, got.body)
	}
	w.sql(`UPDATE runner_identities SET revoked_at = now() WHERE runner_id = $1`, id)
	if got := ask(join, named); got.status != http.StatusForbidden {
		t.Errorf("for a runner that was removed: %d %s", got.status, got.body)
	}
	var self api.APIKey
	w.want(200, "GET", "/v1/self", nil, &self)
	if got := w.do(call{method: "POST", path: "/v1/projects/" + self.ProjectID + "/keys", body: `{"name":"more"}`, key: join}); got.status != http.StatusForbidden {
		t.Errorf("it makes keys: %d %s", got.status, got.body)
	}
}

// TestJoinTokensAreBounded fills the table: another one is refused until some are spent or have expired.
func TestJoinTokensAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.sql(`INSERT INTO runner_tokens (hash, runner_id, expires_at) SELECT sha256(n::text::bytea), 'run_x', now() + interval '1 hour' FROM generate_series(1, 10000) n`)
	c := call{method: "POST", path: "/v1/runner-tokens", body: `{}`, key: apiKey}
	if got := w.do(c); got.status != http.StatusTooManyRequests {
		t.Errorf("%d %s", got.status, got.body)
	}
	w.sql(`UPDATE runner_tokens SET used_at = now() WHERE hash = sha256('1'::bytea)`)
	if got := w.do(c); got.status != http.StatusCreated {
		t.Errorf("when one is spent: %d %s", got.status, got.body)
	}
	w.sql(`UPDATE runner_tokens SET expires_at = now() - interval '1 second'`)
	if got := w.do(c); got.status != http.StatusCreated {
		t.Errorf("when they have expired: %d %s", got.status, got.body)
	}
}
