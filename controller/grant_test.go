package controller_test

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

// safe is a place of secrets outside.
type safe struct {
	mu     sync.Mutex
	values map[string]string
	away   bool
}

func (s *safe) Check(_ core.ProjectID, ref string) error {
	if !strings.HasPrefix(ref, "safe://") {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "vault_ref: %s is nowhere", ref)
	}
	return nil
}

func (s *safe) Read(_ context.Context, project core.ProjectID, ref string) (grant.Secret, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	value, there := s.values[ref]
	switch {
	case s.away:
		return grant.Secret{}, core.Errorf(core.Unavailable, core.CodeSecretUnavailable, "the safe is shut")
	case !there:
		return grant.Secret{}, core.Errorf(core.FailedPrecondition, core.CodeSecretNotFound, "%s is empty for %s", ref, project)
	}
	return grant.NewSecret(value), nil
}

func (s *safe) set(ref, value string, away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.values[ref], s.away = value, away
}

func (s *safe) forget(ref string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.values, ref)
}

// granting is a world in which secrets can be granted.
func granting(t *testing.T) (*world, *safe) {
	t.Helper()
	s := &safe{values: map[string]string{}}
	return newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.Wrapper, c.Secrets = &vault{id: "a"}, s }), s
}

// custom is a request for a grant towards hosts.
func custom(secret string, hosts ...string) grants.Request {
	return grants.Request{Secret: grant.NewSecret(secret), Hosts: hosts}
}

func (w *world) grant(id core.WorkspaceID, name string, r grants.Request) grants.Held {
	w.t.Helper()
	g, _, err := w.Grants().Put(w.t.Context(), w.project, id, name, r)
	if err != nil {
		w.t.Fatalf("grant %s: %v", name, err)
	}
	return g
}

// wantGrants looks at what the egress process of a workspace's host has, opened: name=secret.
func (w *world) wantGrants(id core.WorkspaceID, want ...string) []grant.Grant {
	w.t.Helper()
	ws, err := w.Workspace(w.t.Context(), w.project, id)
	if err != nil {
		w.t.Fatal(err)
	}
	var got []string
	var bundle grant.Bundle
	eventually(w.t, fmt.Sprintf("the grants of %s are %q", ws.Name, want), func() bool {
		if bundle, err = w.runner.Bundle(ws.Sandbox.ID); err != nil {
			return false
		}
		got = nil
		for _, g := range bundle.Grants {
			got = append(got, g.ID+"="+g.Secret.Reveal())
		}
		now, err := w.Workspace(w.t.Context(), w.project, id)
		return err == nil && !now.RulesPending() && slices.Equal(got, want)
	})
	return bundle.Grants
}

// TestGrants: what is granted is with the egress process, sealed for it; what is revoked is not; and forks have it by placeholders of their own.
func TestGrants(t *testing.T) {
	t.Parallel()
	w, _ := granting(t)
	root := w.createAllowing("root", "api.openai.com", "*.example.com", "b.example.com:8443")
	before := w.checkpoint(root.ID)
	g := w.grant(root.ID, "openai", grants.Request{Secret: grant.NewSecret("sk-of-openai-1")})
	if g.Mode != grant.ModeBaseURL || g.Env != "OPENAI_API_KEY" || g.BaseEnv != "OPENAI_BASE_URL" || !slices.Equal(g.Hosts, []string{"api.openai.com:443"}) {
		t.Errorf("what is usual for a provider: %+v", g)
	}
	w.grant(root.ID, "b", grants.Request{
		Secret: grant.NewSecret("secret of b"), Hosts: []string{"b.example.com:8443", "c.example.com"}, Header: "x-api-key", Methods: []string{"GET"},
		Paths: []string{"/v1"}, TTL: time.Hour, MaxBytes: 10, PerMinute: 3,
	})
	inForce := w.wantGrants(root.ID, "b=secret of b", "openai=sk-of-openai-1")
	b := inForce[0]
	if b.Header != "X-Api-Key" || len(b.Targets) != 2 || b.Targets[0].Port != 8443 || b.Expires.IsZero() || b.MaxBytes != 10 || b.PerMinute != 3 || b.Paths[0] != "/v1" || b.Methods[0] != "GET" {
		t.Errorf("b: %+v", b)
	}
	// A checkpoint from before they were granted, forked: today's grants, by other placeholders.
	children := w.fork(before.ID, 2)
	seen := map[string]bool{inForce[0].Placeholder: true, inForce[1].Placeholder: true}
	for _, child := range children {
		for _, g := range w.wantGrants(child.ID, "b=secret of b", "openai=sk-of-openai-1") {
			if seen[g.Placeholder] {
				t.Errorf("%s has a placeholder that another has", child.Name)
			}
			seen[g.Placeholder] = true
		}
	}
	if n := w.runner.Calls(runnertest.PointRules); n == 0 {
		t.Error("no rules went to the runner of the root")
	}
	// Fewer.
	pick := func(choice grants.Choice) core.WorkspaceID {
		t.Helper()
		child, err := w.forkAllowing(before.ID, controller.ForkRequest{Grants: choice})
		if err != nil {
			t.Fatal(err)
		}
		return child.ID
	}
	w.wantGrants(pick(grants.Choice{None: true}))
	one := pick(grants.Choice{Names: []string{"b"}})
	w.wantGrants(one, "b=secret of b")
	wantCode(t, second(w.forkAllowing(before.ID, controller.ForkRequest{Grants: grants.Choice{Names: []string{"none"}}})), core.CodeGrantNotFound)
	// Changed above, with the secret that it has: below, too, by the placeholders of before.
	w.grant(root.ID, "openai", grants.Request{PerMinute: 7})
	for _, g := range w.wantGrants(children[0].ID, "b=secret of b", "openai=sk-of-openai-1") {
		if g.ID == "openai" && g.PerMinute != 7 || !seen[g.Placeholder] {
			t.Errorf("changed above: %+v", g)
		}
	}
	w.grant(root.ID, "openai", grants.Request{Secret: grant.NewSecret("sk-of-openai-2")})
	w.wantGrants(children[0].ID, "b=secret of b", "openai=sk-of-openai-2")
	// A fork's own, in the place of what it has from above.
	w.grant(children[0].ID, "openai", grants.Request{Secret: grant.NewSecret("sk-of-a-fork")})
	w.wantGrants(children[0].ID, "b=secret of b", "openai=sk-of-a-fork")
	w.wantGrants(children[1].ID, "b=secret of b", "openai=sk-of-openai-2")
	// Revoked in a fork: its own forks lose it, and nobody else does.
	grandchild, err := w.forkAllowing(w.checkpoint(children[1].ID).ID, controller.ForkRequest{})
	if err != nil {
		t.Fatal(err)
	}
	w.wantGrants(grandchild.ID, "b=secret of b", "openai=sk-of-openai-2")
	w.revoke(children[1].ID, "b")
	w.wantGrants(children[1].ID, "openai=sk-of-openai-2")
	w.wantGrants(grandchild.ID, "openai=sk-of-openai-2")
	w.wantGrants(root.ID, "b=secret of b", "openai=sk-of-openai-2")
	// Revoked at the root.
	w.revoke(root.ID, "b")
	w.revoke(root.ID, "openai")
	w.wantGrants(one)
	w.wantGrants(grandchild.ID)
	w.wantGrants(children[0].ID, "openai=sk-of-a-fork")
	wantCode(t, w.Grants().Revoke(t.Context(), w.project, root.ID, "b"), core.CodeGrantNotFound)
	if n := w.number(`SELECT count(*) FROM secrets WHERE id NOT IN (SELECT secret_id FROM project_authorities)`); n != 1 {
		t.Errorf("%d secrets are kept, and one is granted", n)
	}
	later, err := w.forkAllowing(before.ID, controller.ForkRequest{})
	if err != nil {
		t.Fatal(err)
	}
	w.wantGrants(later.ID)
}

// TestGrantsBelowOthers: what is changed or revoked reaches those below who have it, also where somebody in between has another by that name.
func TestGrantsBelowOthers(t *testing.T) {
	t.Parallel()
	w, _ := granting(t)
	child := func(of core.WorkspaceID) core.WorkspaceID { return w.fork(w.checkpoint(of).ID, 1)[0].ID }
	root := w.createAllowing("root", "a.example").ID
	w.grant(root, "x", custom("secret of the root", "a.example"))
	a := child(root)
	b := child(a)
	c := child(b)
	d := child(c)
	w.wantGrants(d, "x=secret of the root")
	w.grant(b, "x", custom("secret of b", "a.example"))
	e := child(b)
	w.grant(d, "x", custom("secret of d", "a.example"))
	f := child(d)
	w.wantGrants(b, "x=secret of b")
	w.wantGrants(e, "x=secret of b")
	w.wantGrants(f, "x=secret of d")
	// Changed above: all who have it, wherever they are.
	r := custom("another secret of the root", "a.example")
	r.Methods = []string{"GET"}
	w.grant(root, "x", r)
	for _, id := range []core.WorkspaceID{root, a, c} {
		if g := w.wantGrants(id, "x=another secret of the root"); !slices.Equal(g[0].Methods, r.Methods) {
			t.Errorf("%s has the grant for the methods %q", id, g[0].Methods)
		}
	}
	w.wantGrants(b, "x=secret of b")
	// Revoked: c has it by way of b, which has another.
	w.revoke(a, "x")
	w.wantGrants(a)
	w.wantGrants(c)
	w.wantGrants(root, "x=another secret of the root")
	for id, secret := range map[core.WorkspaceID]string{b: "b", e: "b", d: "d", f: "d"} { // their own
		w.wantGrants(id, "x=secret of "+secret)
	}
	// Who revokes its own takes the name from below, whoever it is from.
	g := child(root)
	h := child(g)
	w.wantGrants(h, "x=another secret of the root")
	w.grant(g, "x", custom("secret of g", "a.example"))
	w.revoke(g, "x")
	w.wantGrants(g)
	w.wantGrants(h)
	w.wantGrants(root, "x=another secret of the root")
	w.revoke(root, "x")
	w.wantGrants(root)
	w.wantGrants(f, "x=secret of d")
}

func (w *world) revoke(id core.WorkspaceID, name string) {
	w.t.Helper()
	if err := w.Grants().Revoke(w.t.Context(), w.project, id, name); err != nil {
		w.t.Fatal(err)
	}
}

// TestGrantsOfOtherProcesses: grants are sealed again for an egress process that has come in the place of another, and before their time is over.
func TestGrantsOfOtherProcesses(t *testing.T) {
	t.Parallel()
	w, _ := granting(t)
	ws := w.createAllowing("a", "a.example")
	w.grant(ws.ID, "a", custom("secret of a", "a.example"))
	w.wantGrants(ws.ID, "a=secret of a")
	w.runner.RestartEgress()
	if _, err := w.runner.Bundle(ws.Sandbox.ID); err == nil {
		t.Fatal("another process opens what was sealed for the first")
	}
	w.beat()
	w.wantGrants(ws.ID, "a=secret of a")
	rules := w.runner.Rules(ws.Sandbox.ID)
	w.sql(`UPDATE workspaces SET grants_until = now() WHERE id = $1`, ws.ID)
	eventually(t, "grants are sealed again", func() bool {
		now := w.runner.Rules(ws.Sandbox.ID)
		return now.Version == rules.Version && string(now.Grants) != string(rules.Grants)
	})
	w.wantGrants(ws.ID, "a=secret of a")
}

// TestAuthority: guests trust their project's authority, and the issuer for a sandbox's grants is below it and for their hosts only.
func TestAuthority(t *testing.T) {
	t.Parallel()
	w, _ := granting(t)
	ws := w.createAllowing("a", "*.x.example", "b.test")
	w.grant(ws.ID, "a", custom("secret of a", "a.x.example"))
	w.grant(ws.ID, "b", grants.Request{Secret: grant.NewSecret("secret of b"), Hosts: []string{"b.test"}, Mode: grant.ModeBaseURL})
	w.wantGrants(ws.ID, "a=secret of a", "b=secret of b")
	now, err := w.Workspace(t.Context(), w.project, ws.ID)
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := w.runner.Bundle(now.Sandbox.ID)
	if err != nil || bundle.Issuer == nil {
		t.Fatal(bundle.Issuer, err)
	}
	block, _ := pem.Decode([]byte(w.runner.CA(now.Sandbox.ID)))
	if block == nil {
		t.Fatal("the guest trusts no authority")
	}
	root, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := x509.ParseCertificate(bundle.Issuer.Certificate)
	if err != nil {
		t.Fatal(err)
	}
	if err := issuer.CheckSignatureFrom(root); err != nil {
		t.Error(err)
	}
	if !slices.Equal(issuer.PermittedDNSDomains, []string{"a.x.example"}) || !issuer.PermittedDNSDomainsCritical || time.Until(issuer.NotAfter) > 9*time.Hour {
		t.Errorf("the issuer is for %q until %s", issuer.PermittedDNSDomains, issuer.NotAfter)
	}
	for _, child := range w.fork(w.checkpoint(ws.ID).ID, 2) {
		if w.runner.CA(child.Sandbox.ID) != w.runner.CA(now.Sandbox.ID) {
			t.Error("a fork trusts another authority")
		}
	}
}

// TestSecretsElsewhere: a secret that is not kept here is read when it is needed, and again; a fork whose grants cannot all be re-issued is not made.
func TestSecretsElsewhere(t *testing.T) {
	t.Parallel()
	w, outside := granting(t)
	const ref = "safe://a"
	ws := w.createAllowing("a", "a.example", "b.example")
	put := func(r grants.Request) error {
		_, _, err := w.Grants().Put(t.Context(), w.project, ws.ID, "a", r)
		return err
	}
	wantCode(t, put(grants.Request{VaultRef: "elsewhere", Hosts: []string{"a.example"}}), core.CodeInvalidField)
	wantCode(t, put(grants.Request{VaultRef: ref, Hosts: []string{"a.example"}}), core.CodeSecretNotFound)
	outside.set(ref, "the first secret", false)
	if err := put(grants.Request{VaultRef: ref, Hosts: []string{"a.example"}}); err != nil {
		t.Fatal(err)
	}
	w.wantGrants(ws.ID, "a=the first secret")
	cp := w.checkpoint(ws.ID)
	outside.set(ref, "the second one", false)
	w.wantGrants(w.fork(cp.ID, 1)[0].ID, "a=the second one")
	outside.set(ref, "the second one", true)
	wantCode(t, second(w.forkAllowing(cp.ID, controller.ForkRequest{})), core.CodeSecretUnavailable)
	if child, err := w.forkAllowing(cp.ID, controller.ForkRequest{Grants: grants.Choice{None: true}}); err != nil {
		t.Error(err)
	} else {
		w.wantGrants(child.ID)
	}
	// Rules are in force at once, whoever is away: without the grant, until it can be had again.
	w.mustAllow(ws.ID, "a.example")
	w.wantRules(ws.ID, "a.example")
	w.wantGrants(ws.ID)
	if held := w.runner.Rules(ws.Sandbox.ID).Held; !slices.Equal(held, []string{"a.example:443"}) { // the host is not one like any other meanwhile
		t.Errorf("held: %q", held)
	}
	outside.set(ref, "the third one", false)
	w.sql(`UPDATE workspaces SET grants_until = now() WHERE id = $1`, ws.ID)
	w.wantGrants(ws.ID, "a=the third one")
}

// TestRulesDoNotWaitForSecrets: what is taken away is taken away when no secret can be decrypted, or the authority cannot be used; grants that need
// it are left out until it can.
func TestRulesDoNotWaitForSecrets(t *testing.T) {
	t.Parallel()
	keys := &flakyVault{vault: vault{id: "a"}}
	outside := &safe{values: map[string]string{"safe://a": "a secret elsewhere"}}
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.Wrapper, c.Secrets = keys, outside })
	ws := w.createAllowing("a", "a.example", "b.example", "c.example")
	w.grant(ws.ID, "kept", custom("a secret that is kept", "a.example"))
	w.grant(ws.ID, "kept-too", custom("another that is kept", "b.example"))
	w.grant(ws.ID, "elsewhere", grants.Request{VaultRef: "safe://a", Hosts: []string{"b.example"}, Mode: grant.ModeBaseURL})
	all := []string{"elsewhere=a secret elsewhere", "kept=a secret that is kept", "kept-too=another that is kept"}
	w.wantGrants(ws.ID, all...)
	again := func() { w.sql(`UPDATE workspaces SET grants_until = now() WHERE id = $1`, ws.ID) }
	cp := w.checkpoint(ws.ID)

	keys.fail(true, false)
	w.mustAllow(ws.ID, "a.example", "b.example")
	w.wantRules(ws.ID, "a.example", "b.example")
	w.wantGrants(ws.ID, all[0])
	wantCode(t, second(w.forkAllowing(cp.ID, controller.ForkRequest{})), core.CodeKeyUnavailable) // half of its grants is not enough for a fork
	w.revoke(ws.ID, "kept-too")
	w.wantGrants(ws.ID, all[0])
	keys.fail(false, false)
	again()
	w.wantGrants(ws.ID, all[0], all[1])

	// Whoever has the keys does not answer at all.
	keys.fail(false, true)
	w.mustAllow(ws.ID, "a.example")
	w.wantRules(ws.ID, "a.example")
	w.wantGrants(ws.ID, all[0])
	keys.fail(false, false)
	again()
	w.wantGrants(ws.ID, all[0], all[1])

	// One row is damaged.
	w.grant(ws.ID, "whole", custom("a secret that is whole", "a.example"))
	w.wantGrants(ws.ID, all[0], all[1], "whole=a secret that is whole")
	w.sql(`UPDATE secrets SET sealed = decode('00', 'hex') || sealed WHERE id = (SELECT secret_id FROM grants WHERE name = 'kept')`)
	w.mustAllow(ws.ID)
	w.wantRules(ws.ID)
	w.wantGrants(ws.ID, all[0], "whole=a secret that is whole")
	// And the one of the authority: what is not injected into TLS goes on.
	w.sql(`UPDATE secrets SET sealed = decode('00', 'hex') || sealed WHERE id IN (SELECT secret_id FROM project_authorities)`)
	again()
	w.wantGrants(ws.ID, all[0])
}

// flakyVault is a keeper of master keys who may be away, or not answer.
type flakyVault struct {
	vault
	mu         sync.Mutex
	gone, mute bool
}

func (f *flakyVault) fail(gone, mute bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gone, f.mute = gone, mute
}

func (f *flakyVault) Unwrap(ctx context.Context, master, name string, wrapped []byte) (core.DataKey, error) {
	f.mu.Lock()
	gone, mute := f.gone, f.mute
	f.mu.Unlock()
	if mute {
		<-ctx.Done()
		return core.DataKey{}, context.Cause(ctx)
	}
	if gone {
		return core.DataKey{}, core.Errorf(core.Unavailable, core.CodeKeyUnavailable, "the master key is away")
	}
	return f.vault.Unwrap(ctx, master, name, wrapped)
}

// TestGrantInput refuses what is no grant, and changes nothing.
func TestGrantInput(t *testing.T) {
	t.Parallel()
	w, _ := granting(t)
	ws := w.createAllowing("a", "a.example")
	good := func(change func(*grants.Request)) grants.Request {
		r := custom("a good secret", "a.example")
		change(&r)
		return r
	}
	for what, r := range map[string]grants.Request{
		"allowed_hosts: the provider": good(func(r *grants.Request) { r.Hosts = nil }),
		"provider: ":                  good(func(r *grants.Request) { r.Provider = "nobody" }),
		"mode: ":                      good(func(r *grants.Request) { r.Mode = "body" }),
		"is not a host":               good(func(r *grants.Request) { r.Hosts = []string{"*.example"} }),
		"is an address":               good(func(r *grants.Request) { r.Hosts = []string{"203.0.113.7"} }),
		"header: ":                    good(func(r *grants.Request) { r.Header = "Host" }),
		"\"a b\" cannot have":         good(func(r *grants.Request) { r.Header = "a b" }),
		"methods: ":                   good(func(r *grants.Request) { r.Methods = []string{"get"} }),
		"paths: ":                     good(func(r *grants.Request) { r.Paths = []string{"/a/../b"} }),
		"env: ":                       good(func(r *grants.Request) { r.Env = "A=B" }),
		"secret: a grant has":         good(func(r *grants.Request) { r.VaultRef = "safe://a" }),
		"secret: a grant needs":       good(func(r *grants.Request) { r.Secret = grant.Secret{} }),
		"base_url_env: ":              good(func(r *grants.Request) { r.Mode, r.BaseEnv = grant.ModeBaseURL, "1" }),
	} {
		_, _, err := w.Grants().Put(t.Context(), w.project, ws.ID, "a", r)
		if core.CodeOf(err) != core.CodeInvalidField || !strings.Contains(core.MessageOf(err), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, secret := range []string{"short", "two\nlines of text", strings.Repeat("x", grant.MaxSecret+1), "\x00\x01 binary", "\xff\xfe not UTF-8"} {
		_, _, err := w.Grants().Put(t.Context(), w.project, ws.ID, "a", custom(secret, "a.example"))
		if core.CodeOf(err) != core.CodeInvalidField || strings.Contains(err.Error(), secret) {
			t.Errorf("the secret %.20q: %v", secret, err)
		}
	}
	for _, name := range []string{"", "A", "a/b", "-a", strings.Repeat("a", 64)} {
		if _, _, err := w.Grants().Put(t.Context(), w.project, ws.ID, name, custom("a good secret", "a.example")); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("called %q: %v", name, err)
		}
	}
	_, _, err := w.Grants().Put(t.Context(), w.project, ws.ID, "a", custom("a good secret", "a.example", "b.example"))
	wantCode(t, err, core.CodeGrantHostDenied)
	_, _, err = w.Grants().Put(t.Context(), w.project, core.NewID[core.WorkspaceID](), "a", custom("a good secret", "a.example"))
	wantCode(t, err, core.CodeWorkspaceNotFound)
	if n := w.number(`SELECT count(*) FROM grants`) + w.number(`SELECT count(*) FROM secrets WHERE id NOT IN (SELECT secret_id FROM project_authorities)`); n != 0 {
		t.Errorf("%d rows are there after nothing was granted", n)
	}
	for i := range grants.MaxGrants {
		w.grant(ws.ID, fmt.Sprint("g", i), custom("a good secret", "a.example"))
	}
	_, _, err = w.Grants().Put(t.Context(), w.project, ws.ID, "more", custom("a good secret", "a.example"))
	wantCode(t, err, core.CodeQuotaExceeded)
}

// TestSecretsAtRest: no row has a secret, in no form, and another master key takes over what the first has wrapped.
func TestSecretsAtRest(t *testing.T) {
	t.Parallel()
	w, _ := granting(t)
	const secret = "the only secret of this test"
	ws := w.createAllowing("a", "a.example")
	w.grant(ws.ID, "a", custom(secret, "a.example"))
	w.wantGrants(ws.ID, "a="+secret)
	children := w.fork(w.checkpoint(ws.ID).ID, 2)
	w.wantGrants(children[1].ID, "a="+secret)
	for table, rows := range w.dumpTables() {
		for _, form := range []string{secret, fmt.Sprintf("%x", secret), base64.StdEncoding.EncodeToString([]byte(secret))[:36], url.QueryEscape(secret)} {
			if strings.Contains(rows, form) {
				t.Errorf("%s has the secret, as %q", table, form)
			}
		}
	}
	// Each time that the secret went to an egress process that did not have it is in the audit log, with whose it is.
	for _, id := range []core.SandboxID{ws.Sandbox.ID, children[0].Sandbox.ID, children[1].Sandbox.ID} {
		if n := w.number(`SELECT count(*) FROM audit_records WHERE action = 'unsealGrants' AND detail -> 'sandboxes' ? $1 AND detail -> 'grants' -> 0 ->> 'grant' = 'a'
			AND detail -> 'grants' -> 0 ->> 'secret_id' IN (SELECT id FROM secrets)`, string(id)); n < 1 { // it may be given twice at once
			t.Errorf("%d records of the secret for sandbox %s", n, id)
		}
	}
	if n := w.number(`SELECT count(*) FROM audit_records WHERE detail ->> 'grant' = 'a'`); n != 1 {
		t.Errorf("%d records of the grant", n)
	}
	w.stop()
	c, _ := w.start(controller.Config{Wrapper: &both{vault{id: "b"}}, LoopInterval: 50 * time.Millisecond})
	if _, err := c.Bootstrap(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := w.number(`SELECT count(*) FROM secrets WHERE master_id <> 'b'`); n != 0 {
		t.Errorf("%d secrets need the first master key still", n)
	}
	w.runner.RestartEgress()
	w.Controller = c
	w.beat()
	w.wantGrants(ws.ID, "a="+secret)
}

// dumpTables is all that the database has, as text, by table.
func (w *world) dumpTables() map[string]string {
	w.t.Helper()
	conn, err := pgx.Connect(w.t.Context(), w.dsn)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(w.t.Context())) }()
	rows, err := conn.Query(w.t.Context(), `SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relkind IN ('r', 'm') AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')`)
	if err != nil {
		w.t.Fatal(err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(tables) < 20 {
		w.t.Fatalf("%d tables, %v", len(tables), err)
	}
	out := map[string]string{}
	for _, table := range tables {
		var text strings.Builder
		if _, err := conn.PgConn().CopyTo(w.t.Context(), &text, "COPY "+table+" TO STDOUT"); err != nil {
			w.t.Fatalf("%s: %v", table, err)
		}
		out[table] = text.String()
	}
	return out
}

// both has the master key of another, too.
type both struct{ vault }

func (b *both) Unwrap(ctx context.Context, master, name string, wrapped []byte) (core.DataKey, error) {
	return b.vault.Unwrap(ctx, master, name, wrapped)
}

// TestGrantEnv: programs find placeholders and base URLs, of this moment, where the request does not say otherwise.
func TestGrantEnv(t *testing.T) {
	t.Parallel()
	w, _ := granting(t)
	ws := w.createAllowing("a", "api.anthropic.com")
	g := w.grant(ws.ID, "anthropic", grants.Request{Secret: grant.NewSecret("sk-ant-something")})
	w.wantGrants(ws.ID, "anthropic=sk-ant-something")
	env := func(own map[string]string) string {
		t.Helper()
		out, err := w.Exec(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"env"}, Env: own})
		if err != nil {
			t.Fatal(err)
		}
		return string(out.Stdout)
	}
	got := env(nil)
	for _, want := range []string{"ANTHROPIC_API_KEY=" + g.Placeholder, "ANTHROPIC_BASE_URL=" + runnertest.EgressURL + "/grant/anthropic"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s in %s", want, got)
		}
	}
	if got := env(map[string]string{"ANTHROPIC_API_KEY": "mine"}); !strings.Contains(got, "ANTHROPIC_API_KEY=mine") {
		t.Errorf("what the request says does not hold: %s", got)
	}
	w.revoke(ws.ID, "anthropic")
	if got := env(nil); strings.Contains(got, "ANTHROPIC") {
		t.Errorf("after it was revoked: %s", got)
	}
}

// TestGrantsComeBack: a workspace that was suspended, or rolled back to before it had a grant, has its grants of now, by the placeholders of before.
func TestGrantsComeBack(t *testing.T) {
	t.Parallel()
	w, _ := granting(t)
	ws := w.createAllowing("a", "a.example")
	before := w.checkpoint(ws.ID)
	g := w.grant(ws.ID, "a", custom("secret of a", "a.example"))
	same := func(what string) {
		t.Helper()
		if got := w.wantGrants(ws.ID, "a=secret of a"); got[0].Placeholder != g.Placeholder {
			t.Errorf("%s: another placeholder", what)
		}
	}
	same("granted")
	if _, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, before.ID, wait); err != nil {
		t.Fatal(err)
	}
	same("rolled back")
	if _, err := w.Suspend(t.Context(), w.project, ws.ID, wait); err != nil {
		t.Fatal(err)
	}
	w.runner.RestartEgress()
	w.beat()
	if _, err := w.Resume(t.Context(), w.project, ws.ID, wait); err != nil {
		t.Fatal(err)
	}
	same("resumed")
	if _, err := w.Suspend(t.Context(), w.project, ws.ID, wait); err != nil {
		t.Fatal(err)
	}
	w.revoke(ws.ID, "a")
	if _, err := w.Resume(t.Context(), w.project, ws.ID, wait); err != nil {
		t.Fatal(err)
	}
	w.wantGrants(ws.ID)
}
