package controller_test

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
)

// inForce waits until the runner of a workspace has its newest rules, whether they are known to be in force or not, and returns them.
func (w *world) inForce(id core.WorkspaceID, is func(runnerapi.EgressRules) bool) runnerapi.EgressRules {
	w.t.Helper()
	var got runnerapi.EgressRules
	eventually(w.t, "the runner has the newest rules", func() bool {
		ws, err := w.Workspace(w.t.Context(), w.project, id)
		if err != nil {
			return false
		}
		got = w.runner.Rules(ws.Sandbox.ID)
		return got.Version == ws.Rules.Version && is(got)
	})
	return got
}

// TestRefusedRules: what a runner does not take is given as less, so that what was taken away is out of force; it stays pending, other workspaces
// have theirs, and the rules are in force when the runner takes them.
func TestRefusedRules(t *testing.T) {
	t.Parallel()
	w, _ := granting(t)
	ws, other := w.createAllowing("a", "a.example", "b.example"), w.createAllowing("other", "a.example")
	w.grant(ws.ID, "a", custom("secret of a", "a.example"))
	w.grant(ws.ID, "b", custom("secret of b", "b.example"))
	w.wantGrants(ws.ID, "a=secret of a", "b=secret of b")
	for name, c := range map[string]struct {
		refuse func(runnerapi.EgressRules) bool
		allow  []string
	}{
		"grants": {func(r runnerapi.EgressRules) bool { return len(r.Grants) > 0 }, []string{"b.example"}},
		"rules":  {func(r runnerapi.EgressRules) bool { return len(r.Allow) > 0 }, nil},
	} {
		w.mustAllow(ws.ID, "a.example", "b.example")
		w.inForce(ws.ID, func(r runnerapi.EgressRules) bool { return len(r.Allow) == 2 && len(r.Grants) > 0 })
		w.runner.RefuseRules(ws.Sandbox.ID, c.refuse)
		now := w.mustAllow(ws.ID, "b.example")
		if !now.RulesPending() {
			t.Errorf("%s that no runner takes are said to be in force", name)
		}
		got := w.inForce(ws.ID, func(r runnerapi.EgressRules) bool { return slices.Equal(r.Allow, c.allow) })
		if len(got.Grants) > 0 {
			t.Errorf("%s: the grants of before are in force: %d bytes", name, len(got.Grants))
		}
		if c.allow != nil && !slices.Equal(got.Held, []string{"a.example:443", "b.example:443"}) {
			t.Errorf("%s: the hosts of grants that were not given are open: %q are held", name, got.Held)
		}
		w.mustAllow(other.ID, "a.example", fmt.Sprintf("%s.example", name))
		w.wantRules(other.ID, slices.Sorted(slices.Values([]string{"a.example", fmt.Sprintf("%s.example", name)}))...)
		w.runner.RefuseRules(ws.Sandbox.ID, nil)
		w.wantRules(ws.ID, "b.example")
		w.wantGrants(ws.ID, "a=secret of a", "b=secret of b")
	}
	// Revoked while what is left is not taken.
	w.runner.RefuseRules(ws.Sandbox.ID, func(r runnerapi.EgressRules) bool { return len(r.Grants) > 0 })
	w.revoke(ws.ID, "a")
	w.inForce(ws.ID, func(r runnerapi.EgressRules) bool { return len(r.Grants) == 0 })
	w.runner.RefuseRules(ws.Sandbox.ID, nil)
	w.wantGrants(ws.ID, "b=secret of b")
}

// TestRefusedAgain: a runner that refuses rules is offered them again and again, and the audit log is told of that once.
func TestRefusedAgain(t *testing.T) {
	t.Parallel()
	w, _ := granting(t)
	ws := w.createAllowing("a", "a.example", "b.example")
	w.grant(ws.ID, "a", custom("secret of a", "a.example"))
	w.wantGrants(ws.ID, "a=secret of a")
	records := func() int {
		return w.number(`SELECT count(*) FROM audit_records WHERE action = 'unsealGrants' AND detail -> 'sandboxes' ? $1`, string(ws.Sandbox.ID))
	}
	before := records()
	var offered atomic.Int64
	w.runner.RefuseRules(ws.Sandbox.ID, func(r runnerapi.EgressRules) bool {
		if len(r.Grants) > 0 {
			offered.Add(1)
		}
		return true
	})
	w.mustAllow(ws.ID, "a.example")
	eventually(t, "the rules are offered again", func() bool { return offered.Load() >= 5 })
	if n := records() - before; n < 1 || n > 2 { // it may be given twice at once
		t.Errorf("%d records of %d offers", n, offered.Load())
	}
	w.runner.RefuseRules(ws.Sandbox.ID, nil)
	w.wantGrants(ws.ID, "a=secret of a")
}

// TestBadKey: where grants cannot be sealed, because a runner says a key that is none, the rules go without them and take away what they should.
func TestBadKey(t *testing.T) {
	t.Parallel()
	w, _ := granting(t)
	ws := w.createAllowing("a", "a.example", "b.example")
	w.grant(ws.ID, "a", custom("secret of a", "a.example"))
	w.wantGrants(ws.ID, "a=secret of a")
	w.sql(`UPDATE runners SET egress_key = 'no key'`)
	w.mustAllow(ws.ID, "a.example")
	got := w.inForce(ws.ID, func(r runnerapi.EgressRules) bool { return slices.Equal(r.Allow, []string{"a.example"}) })
	if len(got.Grants) > 0 || !slices.Equal(got.Held, []string{"a.example:443"}) {
		t.Errorf("grants of %d bytes, and %q are held", len(got.Grants), got.Held)
	}
	w.beat()
	w.wantGrants(ws.ID, "a=secret of a")
}

// TestOldBounds: rows from before there were bounds are delivered as far as they fit, and a host that is taken out of them is out of force.
func TestOldBounds(t *testing.T) {
	t.Parallel()
	w, outside := granting(t)
	ws := w.createAllowing("a", "a.example", "b.example")
	for i := range 4 {
		w.grant(ws.ID, fmt.Sprint("g", i), custom(strings.Repeat("x", 1000), "a.example"))
	}
	w.grant(ws.ID, "vault", func() grants.Request {
		outside.set("safe://a", "a secret outside", false)
		return grants.Request{VaultRef: "safe://a", Hosts: []string{"a.example"}}
	}())
	// A delivery under way has read the old rows and sets grants_until last, so every look asks for another delivery.
	secret := 0 // the length of the secret that is kept outside
	wantNames := func(what string, want ...string) {
		t.Helper()
		eventually(t, fmt.Sprintf("%s: the grants are %q", what, want), func() bool {
			w.sql(`UPDATE workspaces SET grants_until = now() WHERE id = $1`, ws.ID)
			w.inForce(ws.ID, func(r runnerapi.EgressRules) bool { return r.Grants != nil })
			bundle, err := w.runner.Bundle(ws.Sandbox.ID)
			var names []string
			for _, g := range bundle.Grants {
				names = append(names, g.ID)
				if g.ID == "vault" {
					secret = len(g.Secret.Reveal())
				}
			}
			return err == nil && slices.Equal(names, want)
		})
	}
	wantNames("all", "g0", "g1", "g2", "g3", "vault")
	// A secret outside that has grown goes before those that are as they were admitted, and only when there is no room.
	outside.set("safe://a", strings.Repeat(`"`, grant.MaxSecret), false)
	eventually(t, "the grown secret is delivered", func() bool {
		wantNames("grown", "g0", "g1", "g2", "g3", "vault")
		return secret == grant.MaxSecret
	})
	var paths []string
	for i := range 32 {
		paths = append(paths, fmt.Sprintf("/%d/%s", i, strings.Repeat("p", 450)))
	}
	w.sql(`UPDATE grants SET paths = $1 WHERE name <> 'vault'`, paths)
	wantNames("grown with large ones", "g0", "g1", "g2", "g3")
	w.sql(`UPDATE grants SET paths = paths || paths WHERE name = 'g1'`)
	w.sql(`UPDATE grants SET paths = paths || paths || paths WHERE name = 'g3'`)
	wantNames("large ones", "g0", "g1", "g2")
	_, err := w.forkAllowing(w.checkpoint(ws.ID).ID, controller.ForkRequest{})
	wantCode(t, err, core.CodeGrantsTooLarge)
	if child, err := w.forkAllowing(w.checkpoint(ws.ID).ID, controller.ForkRequest{Grants: grants.Choice{Names: []string{"g0", "g1"}}}); err != nil {
		t.Error(err)
	} else {
		w.wantRules(child.ID, "a.example", "b.example")
	}
	// Hosts that alone are too much for a message: nothing may be reached, so what was taken out is not either.
	var hosts []string
	for i := range 2048 {
		hosts = append(hosts, fmt.Sprintf("h%d.%s.%s.example:443", i, strings.Repeat("a", 63), strings.Repeat("b", 63)))
	}
	w.sql(`UPDATE grants SET hosts = $1`, hosts)
	w.mustAllow(ws.ID, "b.example")
	w.inForce(ws.ID, func(r runnerapi.EgressRules) bool { return len(r.Allow)+len(r.Grants)+len(r.Held) == 0 })
	if now, err := w.Workspace(t.Context(), w.project, ws.ID); err != nil || !now.RulesPending() {
		t.Errorf("rules that cannot be sent are said to be in force: %v", err)
	}
	for i := range 4 {
		w.revoke(ws.ID, fmt.Sprint("g", i))
	}
	w.revoke(ws.ID, "vault")
	w.wantRules(ws.ID, "b.example")
}

// TestNarrowedBounds: what a fork is left with after a change above stays within the bounds of rules, also where both lists together are not.
func TestNarrowedBounds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var above, below, narrowed []string
	for i := range policy.MaxRules - 2 {
		above = append(above, fmt.Sprintf("x%d.a.example", i))
		below = append(below, fmt.Sprintf("y%d.b.example", i))
	}
	root := w.createAllowing("root", "*.a.example", "*.b.example")
	own := append([]string{"*.a.example"}, below...)
	child, err := w.forkAllowing(w.checkpoint(root.ID).ID, controller.ForkRequest{Allow: &own})
	if err != nil {
		t.Fatal(err)
	}
	w.mustAllow(root.ID, append([]string{"*.b.example"}, above...)...)
	now, err := w.Workspace(t.Context(), w.project, child.ID)
	if err != nil {
		t.Fatal(err)
	}
	narrowed = now.Rules.Allow
	p, err := policy.Parse("allow", narrowed)
	if err == nil {
		err = p.CheckSize("allow")
	}
	if err != nil || len(narrowed) != policy.MaxRules {
		t.Errorf("%d entries are left: %v", len(narrowed), err)
	}
	for _, e := range below {
		if !slices.Contains(narrowed, e) {
			t.Errorf("%s was the fork's own, is allowed above, and is gone", e)
		}
	}
	w.wantRules(child.ID, narrowed...)
	w.mustAllow(root.ID, "x1.a.example")
	w.wantRules(child.ID, "x1.a.example")
}

// TestPendingForAll: workspaces whose rules no runner takes keep no other waiting, however many there are.
func TestPendingForAll(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first, second := w.createAllowing("first", "a.example"), w.createAllowing("second", "a.example")
	w.stop()
	w.sql(`UPDATE workspaces SET egress_applied = 0, egress_version = 2`)
	seen := map[core.WorkspaceID]bool{}
	for range 64 {
		if err := w.store.InTx(t.Context(), controller.System(), func(tx controller.AllTx) error {
			list, err := tx.PendingRules(t.Context(), 1)
			for _, ws := range list {
				seen[ws.ID] = true
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	if !seen[first.ID] || !seen[second.ID] {
		t.Errorf("one waits for the other for ever: %v", seen)
	}
}

// TestDeniedOutside: a secret that is denied where it is kept is taken from what runs, and the rest stays.
func TestDeniedOutside(t *testing.T) {
	t.Parallel()
	w, outside := granting(t)
	ws := w.createAllowing("a", "a.example")
	outside.set("safe://a", "a secret outside", false)
	w.grant(ws.ID, "kept", custom("a secret inside", "a.example"))
	w.grant(ws.ID, "outside", grants.Request{VaultRef: "safe://a", Hosts: []string{"a.example"}})
	w.wantGrants(ws.ID, "kept=a secret inside", "outside=a secret outside")
	if left := w.number(`SELECT extract(epoch FROM grants_until - now())::int FROM workspaces WHERE id = $1`, ws.ID); left > 120 {
		t.Errorf("a secret outside is read again in %d s", left)
	}
	outside.forget("safe://a")
	w.sql(`UPDATE workspaces SET grants_until = now() WHERE id = $1`, ws.ID)
	w.wantGrants(ws.ID, "kept=a secret inside")
}

// TestProjectGrants: the grants of a project have a bound in count, over all its living workspaces.
func TestProjectGrants(t *testing.T) {
	t.Parallel()
	w, _ := granting(t)
	ws := w.createAllowing("a", "a.example")
	other := w.createAllowing("other", "a.example")
	w.grant(ws.ID, "first", custom("a good secret", "a.example"))
	w.sql(`INSERT INTO grants (id, project_id, workspace_id, name, provider, mode, vault_ref, secret_id, hosts, header, methods, paths, env, base_env, base_path, max_bytes, per_minute)
		SELECT 'grant_' || n, g.project_id, $2, 'old' || n, g.provider, g.mode, 'safe://a', NULL, g.hosts, g.header, g.methods, g.paths, g.env, '', '', 0, 0
		FROM grants g, generate_series(2, $1::int) AS n`, grants.MaxProjectGrants, other.ID)
	w.sql(`INSERT INTO grant_holders (workspace_id, name, project_id, grant_id, placeholder) SELECT workspace_id, name, project_id, id, 'placeholder of ' || id FROM grants WHERE workspace_id = $1`, other.ID)
	_, _, err := w.Grants().Put(t.Context(), w.project, ws.ID, "more", custom("a good secret", "a.example"))
	wantCode(t, err, core.CodeQuotaExceeded)
	if n := w.number(`SELECT count(*) FROM secrets WHERE id NOT IN (SELECT secret_id FROM project_authorities)`); n != 1 {
		t.Errorf("%d secrets are kept of 1 that was granted", n)
	}
	w.grant(ws.ID, "first", custom("another good secret", "a.example"))
	w.sql(`DELETE FROM grants WHERE name = 'old2'`)
	w.grant(ws.ID, "more", custom("a good secret", "a.example"))
	_, _, err = w.Grants().Put(t.Context(), w.project, ws.ID, "most", custom("a good secret", "a.example"))
	wantCode(t, err, core.CodeQuotaExceeded)
	if _, err := w.Terminate(t.Context(), w.project, other.ID, wait); err != nil {
		t.Fatal(err)
	}
	w.grant(ws.ID, "most", custom("a good secret", "a.example"))
}
