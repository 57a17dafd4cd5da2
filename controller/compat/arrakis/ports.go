package arrakis

import (
	"net"
	"net/http"
	"strconv"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// maxPorts bounds the forwarded ports of a VM. Coppice's bound for a workspace is higher: its own clients may forward some, too.
const maxPorts = 32

// portView is Arrakis' port forward: ports are texts. The address is an addition.
type portView struct {
	HostPort    string `json:"hostPort"`
	GuestPort   string `json:"guestPort"`
	Description string `json:"description"`
	HostAddress string `json:"hostAddress"`
}

// forwards returns the forwarded ports of a running VM, with the addresses at which the runner's host listens.
func (c call) forwards(r *http.Request, ws coppice.Workspace) ([]portView, error) {
	ports, err := c.Ports(r.Context(), ws.ID)
	if err != nil {
		return nil, err
	}
	var out []portView
	for _, p := range ports {
		host, port, err := net.SplitHostPort(p.Listen)
		if err != nil {
			continue // a preview, or the runner has not said yet where it listens
		}
		out = append(out, portView{HostPort: port, GuestPort: strconv.Itoa(p.GuestPort), Description: c.layer.description(p.GuestPort), HostAddress: host})
	}
	return out, nil
}

func (l *layer) description(port int) string {
	for _, p := range l.Ports {
		if p.Guest == port {
			return p.Description
		}
	}
	return ""
}

// forward forwards the ports of a VM that are not forwarded yet. A port that cannot be forwarded is left out: the VM is good without.
func (c call) forward(r *http.Request, ws coppice.Workspace) error {
	if len(c.layer.Ports) == 0 {
		return nil
	}
	have, err := c.Ports(r.Context(), ws.ID)
	if err != nil {
		return err
	}
	there := map[int]bool{}
	for _, p := range have {
		there[p.GuestPort] = there[p.GuestPort] || p.Listen != ""
	}
	for _, p := range c.layer.Ports {
		if there[p.Guest] {
			continue
		}
		if _, err := c.CreatePort(r.Context(), ws.ID, coppice.CreatePortRequest{GuestPort: p.Guest}); err != nil {
			c.layer.Log.WarnContext(r.Context(), "a port of a VM was not forwarded", "workspace_id", ws.ID, "guest_port", p.Guest, "err", err)
		}
	}
	return nil
}
