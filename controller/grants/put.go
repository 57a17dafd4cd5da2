package grants

import (
	"context"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/secretstore"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
)

// reserve returns the number of bytes that a grant's secret is admitted with. If no secret is given, the grant keeps the one that it has.
func (g *Grant) reserve(value grant.Secret) {
	g.Reserved = value.Size()
	if g.VaultRef != "" { // Vault may have another value later
		g.Reserved = max(g.Reserved, grant.ReservedSecret)
	}
}

// measure returns the size of a grant in the message for its workspace, in bytes.
func (g *Grant) measure() error {
	one, err := g.proxied("", grant.Secret{})
	g.Size = grant.Size(one, g.Reserved)
	return err
}

// proxied is a grant as the egress proxy has it.
func (g Grant) proxied(placeholder string, value grant.Secret) (grant.Grant, error) {
	out := grant.Grant{
		ID: g.Name, Mode: g.Mode, Placeholder: placeholder, Secret: value, Header: g.Header, Methods: g.Methods, Paths: g.Paths,
		Expires: g.ExpiresAt, MaxBytes: g.MaxBytes, PerMinute: g.PerMinute,
	}
	for _, text := range g.Hosts {
		h, port, err := policy.ParseHostPort(text)
		if err != nil {
			return out, err
		}
		out.Targets = append(out.Targets, grant.Target{Host: h, Port: port})
	}
	return out, nil
}

// scope says where, how and until when a workspace may use a grant's secret.
func (g Grant) scope() grant.Scope {
	return grant.Scope{Mode: g.Mode, Hosts: g.Hosts, Header: g.Header, Methods: g.Methods, Paths: g.Paths, Expires: g.ExpiresAt}
}

// keepSecret gives a grant the secret of the grant that it replaces, unless the new scope is wider: the client that gave the secret agreed to
// the old scope. Otherwise a key that may write grants could have an unknown secret sent to a host of its own.
func keepSecret(was Grant, g *Grant, ttl time.Duration) error {
	now := g.scope()
	if ttl > 0 {
		now.Expires = time.Now().Add(ttl)
	}
	if beyond := now.Beyond(was.scope()); beyond != nil {
		return core.Errorf(core.FailedPrecondition, core.CodeSecretRequired,
			"%s: the change would widen the use of the secret that grant %s keeps; give secret or vault_ref again, or do not widen these fields",
			strings.Join(beyond, ", "), g.Name)
	}
	g.VaultRef, g.SecretID, g.Reserved = was.VaultRef, was.SecretID, was.Reserved
	return nil
}

// roomFor refuses one more grant of a workspace.
func roomFor(g Grant, held []Held) error {
	if len(held) >= MaxGrants {
		return core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "workspace %s has %d grants, the maximum; revoke one", g.Owner, len(held))
	}
	return nil
}

// roomForOwn refuses one more grant that a workspace of a project owns.
func roomForOwn(ctx context.Context, tx Tx, project core.ProjectID) error {
	n, err := tx.CountGrants(ctx, project)
	if err == nil && n >= MaxProjectGrants {
		err = core.Errorf(core.Exhausted, core.CodeQuotaExceeded,
			"the workspaces of the project own %d grants, the maximum; revoke some, also those of ended workspaces", n)
	}
	return err
}

// deliverable refuses a grant if one of the workspaces that have it would then have too large grants to send to its host. It never refuses a
// grant that became no larger.
func deliverable(ctx context.Context, tx Tx, g Grant, was int) error {
	if g.Size <= was {
		return nil
	}
	id, size, err := tx.LargestHolder(ctx, g.ID)
	if err == nil && size > grant.MaxBundle {
		err = core.Errorf(core.FailedPrecondition, core.CodeGrantsTooLarge,
			"the grants of workspace %s would take %d bytes with their secrets (this one %d), and at most %d can be sent to its host; revoke one there, or name fewer hosts and paths",
			id, size, g.Size, grant.MaxBundle)
	}
	return err
}

func putGrant(ctx context.Context, tx Tx, g Grant, ttl time.Duration, encrypted *secretstore.Secret) (Held, error) {
	was, list, err := heldGrant(ctx, tx, g.Owner, g.Name)
	if err != nil && core.CategoryOf(err) != core.NotFound {
		return was, err
	}
	own := err == nil && was.Owner == g.Owner
	if err != nil {
		if err := roomFor(g, list); err != nil {
			return was, err
		}
	}
	if !own {
		if err := roomForOwn(ctx, tx, g.ProjectID); err != nil {
			return was, err
		}
	}
	switch {
	case encrypted == nil && g.VaultRef == "" && own:
		if err := keepSecret(was.Grant, &g, ttl); err != nil {
			return was, err
		}
	case encrypted == nil && g.VaultRef == "":
		return was, badGrant("secret", "a grant needs its secret: give secret, or vault_ref")
	case encrypted != nil:
		g.SecretID = encrypted.ID
		if err := tx.InsertSecret(ctx, *encrypted); err != nil {
			return was, err
		}
	}
	if err := g.measure(); err != nil {
		return was, err
	}
	held, err := tx.PutGrant(ctx, g, ttl, grant.NewPlaceholder())
	if err != nil {
		return held, err
	}
	before := 0
	if own {
		before = was.Size
	}
	if err := deliverable(ctx, tx, held.Grant, before); err != nil {
		return held, err
	}
	if own && was.SecretID != "" && was.SecretID != g.SecretID {
		if err := tx.DeleteSecret(ctx, was.SecretID); err != nil {
			return held, err
		}
	}
	holders, err := tx.GrantHolders(ctx, held.ID)
	if err != nil {
		return held, err
	}
	return held, tx.ChangedGrants(ctx, holders)
}
