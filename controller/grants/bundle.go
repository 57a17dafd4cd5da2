package grants

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/ca"
	"github.com/coppice-dev/coppice/egress/grant"
)

// Given is what the runner of a sandbox is known to have of the sandbox's rules and grants.
type Given struct {
	Version int64     // of its rules
	Key     []byte    // the key that its grants were encrypted for
	Until   time.Time // when they have to be encrypted again
}

const (
	issuerTime  = 8 * time.Hour    // validity of an authority for the hosts of a sandbox's grants
	renewTime   = 4 * time.Hour    // after this time it is replaced
	refreshTime = 2 * time.Minute  // after this time a secret that may be changed elsewhere is read again
	retryTime   = 15 * time.Second // after this time a secret that was not available is requested again
	secretsTime = 3 * time.Second  // how long rules wait for secrets
)

// Bundle has the rules and grants of a sandbox for its runner.
type Bundle struct {
	Rules runnerapi.EgressRules
	Given Given
	less  error // why rules allow less than they should
}

// Bundles makes the bundles of workspaces: their present rules and grants, encrypted for the egress process of each host. If a secret is not
// available, it fails with an error that names the grant. With lenient set it leaves out grants whose secret is not available, and waits for
// secrets no longer than secretsTime.
func (m *Manager) Bundles(ctx context.Context, list []Workspace, lenient bool) ([]Bundle, error) {
	out := make([]Bundle, len(list))
	var granted []core.WorkspaceID
	for i, w := range list {
		out[i] = Bundle{Rules: w.Rules.wire(), Given: Given{Version: w.Rules.Version}}
		if w.Rules.Granted {
			granted = append(granted, w.ID)
		}
	}
	if len(granted) == 0 {
		return out, shrink(list, out, lenient)
	}
	held, err := inSystem(ctx, m, func(tx Tx) ([]Held, error) { return tx.HeldGrants(ctx, granted) })
	if err != nil {
		return nil, err
	}
	byID := map[core.WorkspaceID][]Held{}
	for _, g := range held {
		byID[g.Workspace] = append(byID[g.Workspace], g)
	}
	keyless := map[core.WorkspaceID]bool{}
	for i, w := range list {
		out[i].Rules.Held = heldHosts(byID[w.ID])
		keyless[w.ID] = len(w.Sandbox.EgressKey) == 0
	}
	var limit time.Duration
	if lenient {
		limit = secretsTime
	}
	secrets, err := m.open(ctx, slices.DeleteFunc(held, func(g Held) bool { return keyless[g.Workspace] }), limit)
	if err != nil {
		return nil, err
	}
	var disclosed decrypted
	for i, w := range list {
		if !w.Rules.Granted || len(w.Sandbox.EgressKey) == 0 {
			continue
		}
		bundle, until, err := m.bundle(ctx, secrets, w, byID[w.ID], lenient)
		for _, mode := range []grant.Mode{grant.ModeHeader, grant.ModeBaseURL} { // grants that need an issuer come first
			if err != nil && lenient {
				m.cfg.Log.WarnContext(ctx, "grants cannot be given", "workspace_id", w.ID, "mode", mode, "err", err)
				secrets.leaveOut(byID[w.ID], mode)
				bundle, until, err = m.bundle(ctx, secrets, w, byID[w.ID], lenient)
			}
		}
		if err == nil {
			out[i].Rules.Grants, err = grant.Encrypt(w.Sandbox.EgressKey, w.Sandbox.ID, w.Rules.Version, bundle)
		}
		if err != nil && !lenient {
			return nil, err
		}
		if err != nil { // the hosts of its grants stay reserved: nothing reaches them without the proxy
			m.cfg.Log.ErrorContext(ctx, "rules sent without grants", "workspace_id", w.ID, "err", err)
			until = secrets.now.Add(retryTime)
		}
		out[i].Rules.Key = w.Sandbox.EgressKey
		out[i].Given.Key, out[i].Given.Until = w.Sandbox.EgressKey, until
		disclosed.add(i, w, byID[w.ID], secrets, &m.decryptions)
	}
	if err := disclosed.record(ctx, m, list); err != nil {
		if !lenient {
			return nil, err
		}
		m.cfg.Log.ErrorContext(ctx, "secrets withheld: the audit record cannot be written", "err", err)
		for _, i := range disclosed.places {
			out[i].Rules.Grants, out[i].Given.Until = nil, secrets.now.Add(retryTime)
		}
	}
	return out, shrink(list, out, lenient)
}

// heldHosts are the hosts that a workspace reaches only with a grant, sorted. They include the hosts of expired grants and of grants whose
// secret is not available: a missing grant must not open a host.
func heldHosts(grants []Held) []string {
	var out []string
	for _, g := range grants {
		if g.Mode == grant.ModeHeader {
			out = append(out, g.Hosts...)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// openedSecrets has the secrets of some grants, in memory, for one call.
type openedSecrets struct {
	now     time.Time
	values  map[core.GrantID]grant.Secret
	roots   map[core.ProjectID]ca.Authority
	lacking map[core.GrantID]bool
}

// open gets the secrets of grants, each once. With a limit it takes at most that long, and notes the secrets that are not available as lacking.
func (m *Manager) open(ctx context.Context, held []Held, limit time.Duration) (*openedSecrets, error) {
	whole := ctx
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	k := &openedSecrets{time.Now(), map[core.GrantID]grant.Secret{}, map[core.ProjectID]ca.Authority{}, map[core.GrantID]bool{}}
	var ids []string
	keys, untrusted := map[core.ProjectID]string{}, map[core.ProjectID]error{}
	for _, g := range held {
		if g.Expired(k.now) {
			continue
		}
		if g.SecretID != "" && !slices.Contains(ids, g.SecretID) {
			ids = append(ids, g.SecretID)
		}
		if g.Mode != grant.ModeHeader || keys[g.ProjectID] != "" || untrusted[g.ProjectID] != nil {
			continue
		}
		a, err := m.cfg.Secrets.Authority(ctx, g.ProjectID)
		if err != nil {
			untrusted[g.ProjectID] = err
			continue
		}
		keys[g.ProjectID], k.roots[g.ProjectID] = a.SecretID, ca.Authority{Certificate: a.Certificate}
		ids = append(ids, a.SecretID)
	}
	opened, failed := m.cfg.Secrets.Decrypt(ctx, ids)
	for project, id := range keys {
		root := k.roots[project]
		root.Key = opened[id]
		if k.roots[project] = root; root.Key == nil {
			untrusted[project] = cmp.Or(failed[id], errReplaced)
		}
	}
	for _, g := range held {
		if _, there := k.values[g.ID]; there || g.Expired(k.now) || k.lacking[g.ID] {
			continue
		}
		value, err := m.valueOf(ctx, g, opened, failed)
		if g.Mode == grant.ModeHeader && err == nil {
			err = untrusted[g.ProjectID]
		}
		switch {
		case err == nil:
			k.values[g.ID] = value
		case limit > 0 && whole.Err() == nil:
			k.lacking[g.ID] = true
			m.cfg.Log.WarnContext(ctx, "the secret of a grant is not available", "workspace_id", g.Workspace, "grant_id", g.Name, "err", err)
		default:
			return nil, core.Wrapf(err, core.CategoryOf(err), core.CodeOf(err), "grant %s of workspace %s: %s", g.Name, g.Owner, core.MessageOf(err))
		}
	}
	return k, nil
}

// leaveOut notes the grants of a mode as lacking.
func (k *openedSecrets) leaveOut(held []Held, mode grant.Mode) {
	for _, g := range held {
		if g.Mode == mode {
			delete(k.values, g.ID)
			k.lacking[g.ID] = true
		}
	}
}

// errReplaced says that a grant has another secret by now: the rules have a newer version.
var errReplaced error = core.Errorf(core.Unavailable, core.CodeSecretUnavailable, "its secret was replaced a moment ago; try again")

func (m *Manager) valueOf(ctx context.Context, g Held, opened map[string][]byte, failed map[string]error) (grant.Secret, error) {
	if g.VaultRef != "" {
		return m.readSource(ctx, g.ProjectID, g.VaultRef)
	}
	value, there := opened[g.SecretID]
	if !there {
		return grant.Secret{}, cmp.Or(failed[g.SecretID], errReplaced)
	}
	return grant.NewSecret(string(value)), nil
}

// bundle returns the grants of a workspace for a proxy, and the time of their next change. With lenient set it leaves out grants that do not
// fit.
func (m *Manager) bundle(ctx context.Context, k *openedSecrets, w Workspace, held []Held, lenient bool) (grant.Bundle, time.Time, error) {
	until := k.now.Add(renewTime)
	soon := func(d time.Duration) {
		if at := k.now.Add(d); at.Before(until) {
			until = at
		}
	}
	var b grant.Bundle
	var reserved []int
	for _, g := range held {
		if k.lacking[g.ID] {
			soon(retryTime)
		}
		value, there := k.values[g.ID]
		if !there {
			continue
		}
		if g.VaultRef != "" {
			soon(refreshTime)
		}
		one, err := g.proxied(g.Placeholder, value)
		if err != nil {
			return b, until, err
		}
		b.Grants, reserved = append(b.Grants, one), append(reserved, g.Reserved)
	}
	fit := grant.Fit(b.Grants, reserved)
	if i := slices.Index(fit, false); i >= 0 && !lenient {
		return b, until, core.Errorf(core.FailedPrecondition, core.CodeGrantsTooLarge,
			"grant %s of workspace %s: with its present secret the grants exceed the %d bytes that can be sent to a host; revoke a grant, or store a shorter secret", b.Grants[i].ID, w.ID, grant.MaxBundle)
	}
	for i, fits := range slices.Backward(fit) {
		if !fits {
			m.cfg.Log.WarnContext(ctx, "grant left out: the grants of the workspace exceed their bound",
				"workspace_id", w.ID, "grant_id", b.Grants[i].ID)
			b.Grants = slices.Delete(b.Grants, i, i+1)
		}
	}
	hosts := grant.NewSet(b.Grants...).Hosts()
	if len(hosts) == 0 {
		return b, until, nil
	}
	issuer, err := k.roots[w.ProjectID].Issuer(hosts, k.now, k.now.Add(issuerTime))
	b.Issuer = &issuer
	return b, until, err
}
