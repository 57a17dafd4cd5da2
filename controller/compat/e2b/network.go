package e2b

import (
	"net/http"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// updateNetwork replaces the rules of a sandbox: an absent field clears it, as in E2B. What a sandbox with closed egress may reach
// can change; whether its egress is open cannot.
func (l *layer) updateNetwork(w http.ResponseWriter, r *http.Request, c call) error {
	var q struct {
		AllowInternetAccess *bool          `json:"allow_internet_access"`
		AllowOut            []string       `json:"allowOut"`
		DenyOut             []string       `json:"denyOut"`
		DNSServers          []string       `json:"dnsServers"`
		EgressProxy         any            `json:"egressProxy"`
		Rules               map[string]any `json:"rules"`
	}
	if err := readJSON(r, &q); err != nil {
		return err
	}
	as := createRequest{AllowInternetAccess: q.AllowInternetAccess, Network: &networkRequest{
		AllowOut: q.AllowOut, DenyOut: q.DenyOut, DNSServers: q.DNSServers, EgressProxy: q.EgressProxy, Rules: q.Rules,
	}}
	ws, err := c.workspace(r)
	if err != nil {
		return err
	}
	if err := as.unsupported(); err != nil {
		return err
	}
	want, err := as.network(l.OpenEgress)
	if err != nil {
		return err
	}
	switch {
	case want.EgressPolicy != ws.Network.EgressPolicy && want.EgressPolicy == coppice.EgressAllowAll:
		return unsupported("to open the egress of a sandbox that was created with closed egress")
	case want.EgressPolicy != ws.Network.EgressPolicy:
		return unsupported("to close the egress of a sandbox that was created with open egress")
	case want.EgressPolicy == coppice.EgressDenyAll:
		change := coppice.NetworkPatch{Allow: &coppice.Allow{}}
		if want.Allow != nil {
			change.Allow = want.Allow
		}
		if _, err := c.PatchWorkspace(r.Context(), ws.ID, coppice.PatchWorkspaceRequest{Network: &change}); err != nil {
			return err
		}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
