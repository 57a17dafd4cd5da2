package arbor

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const (
	brokeredProxy = "brokered_proxy"
	vaultScheme   = "vault://"
	defaultField  = "value" // of a secret in Vault: Arbor's references name none

	// undoTime is how long the entries of a grant that failed may take to be removed again.
	undoTime = 10 * time.Second
)

type grantRequest struct {
	Provider     string   `json:"provider"`
	Mode         string   `json:"mode"`
	VaultRef     string   `json:"vault_ref"`
	AllowedHosts []string `json:"allowed_hosts"`
	TTLSeconds   int      `json:"ttl_seconds"`
	Env          string   `json:"env"`
	Inject       struct {
		Kind string `json:"kind"`
		Name string `json:"name"`
	} `json:"inject"`
}

// putGrant gives a workspace a secret for some hosts. In Arbor, a grant also opens the way to them; so the hosts are added to the rules of
// the workspace first, and removed again if there is no grant.
func putGrant(r *http.Request, c call) (answer, error) {
	var q grantRequest
	if err := c.read(&q); err != nil {
		return answer{}, err
	}
	req, err := grantOf(q)
	if err != nil {
		return answer{}, err
	}
	added, err := c.allow(r.Context(), q.AllowedHosts)
	if err != nil {
		return answer{}, err
	}
	grant, err := c.PutGrant(r.Context(), c.id, r.PathValue("grant"), req)
	if err != nil {
		c.disallow(r.Context(), added)
		return answer{}, err
	}
	body, err := with(grant, map[string]any{"grant_id": grant.ID, "status": "active", "mode": brokeredProxy})
	return answer{http.StatusOK, body}, err
}

func grantOf(q grantRequest) (coppice.PutGrantRequest, error) {
	req := coppice.PutGrantRequest{
		Provider: q.Provider, Mode: coppice.Header, AllowedHosts: q.AllowedHosts, TTLSeconds: int64(q.TTLSeconds), VaultRef: q.VaultRef, Env: q.Env,
	}
	if q.Mode != "" && q.Mode != brokeredProxy {
		return req, unsupported("mode is %q: a secret never enters a machine, so the only mode is %s", shared.Clip(q.Mode), brokeredProxy)
	}
	switch q.Inject.Kind {
	case "", "authorization_header":
	case "header":
		req.Header = q.Inject.Name
	default:
		return req, unsupported("inject.kind is %q: it is authorization_header or header", shared.Clip(q.Inject.Kind))
	}
	if strings.HasPrefix(req.VaultRef, vaultScheme) && !strings.Contains(req.VaultRef, "#") {
		req.VaultRef += "#" + defaultField
	}
	return req, nil
}

// allow adds hosts to the rules of the workspace, and returns the entries that were not there. The server writes entries in a form of its own, so
// they are read before and after.
func (c call) allow(ctx context.Context, hosts []string) (added coppice.Allow, err error) {
	before, err := c.Workspace(ctx, c.id)
	if err != nil || before.Network.EgressPolicy != coppice.EgressDenyAll || len(hosts) == 0 {
		return nil, err
	}
	after, err := c.PatchWorkspace(ctx, c.id, coppice.PatchWorkspaceRequest{Version: before.Version, Network: &coppice.NetworkPatch{Add: hosts}})
	if err != nil {
		return nil, err
	}
	for _, entry := range after.Network.Allow {
		if !slices.Contains(before.Network.Allow, entry) {
			added = append(added, entry)
		}
	}
	return added, nil
}

// disallow removes what was added for a grant that was refused. Another grant for the same host that was put at the same time loses its way to
// it then; its owner sees that in the rules.
func (c call) disallow(ctx context.Context, hosts coppice.Allow) {
	if len(hosts) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if _, err := c.PatchWorkspace(ctx, c.id, coppice.PatchWorkspaceRequest{Network: &coppice.NetworkPatch{Remove: hosts}}); err != nil {
		c.layer.Log.WarnContext(ctx, "a workspace may still reach the hosts of a grant that was refused", "workspace_id", c.id, "hosts", hosts, "err", err)
	}
}

// revokeGrant ends a grant. The workspace may still reach its hosts, without the secret.
func revokeGrant(r *http.Request, c call) (answer, error) {
	return answer{status: http.StatusNoContent}, c.RevokeGrant(r.Context(), c.id, r.PathValue("grant"))
}
