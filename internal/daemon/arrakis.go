package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/compat/arrakis"
	"github.com/coppice-dev/coppice/core"
)

// ArrakisConfig says how clients of Arrakis are served.
type ArrakisConfig struct {
	Listen     string // host:port; empty: nowhere
	KeyFile    string // has the API key for requests without one; only on loopback. Empty: every request needs a key
	Key        string // the key itself, if KeyFile is empty
	Image      string // of new VMs; empty: base
	Ports      string // forwarded in each VM, as arrakis.ParsePorts reads them
	OpenEgress bool   // new VMs reach everything
}

// Validate refuses a listener that others than this host reach and that needs no key.
func (c ArrakisConfig) Validate() error {
	if c.Listen == "" {
		return nil
	}
	if _, err := arrakis.ParsePorts(c.Ports); err != nil {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "--arrakis-ports: %v", err)
	}
	if c.KeyFile == "" && c.Key == "" {
		return nil
	}
	return onlyThisHost(c.Listen, "arrakis-listen", "Arrakis")
}

// Handler makes the layer for Arrakis' clients over the REST API. It also says in a few words who may do what there.
func (c ArrakisConfig) Handler(ctx context.Context, api http.Handler, control *controller.Controller, log *slog.Logger) (http.Handler, string, error) {
	ports, err := arrakis.ParsePorts(c.Ports)
	if err != nil {
		return nil, "", err
	}
	key := c.Key
	if c.KeyFile != "" {
		b, err := os.ReadFile(c.KeyFile)
		if err != nil {
			return nil, "", fmt.Errorf("--arrakis-key-file: %w", err)
		}
		if key = strings.TrimSpace(string(b)); key == "" {
			return nil, "", core.Errorf(core.Invalid, core.CodeInvalidField, "--arrakis-key-file %s: the file is empty; write an API key into it", core.Clip(c.KeyFile))
		}
	}
	access, err := accessTerms(ctx, control, "Arrakis", key)
	if err != nil {
		return nil, "", err
	}
	h, err := arrakis.New(arrakis.Config{API: api, Key: key, Image: c.Image, Ports: ports, OpenEgress: c.OpenEgress, Log: log.With("component", "arrakis")})
	return h, access + "; egress " + c.egress(), err
}

// projectOf is the name of a key's project.
func projectOf(ctx context.Context, control *controller.Controller, secret string) (string, error) {
	key, err := control.Tenancy.Authenticate(ctx, secret)
	if err != nil {
		return "", err
	}
	project, _, err := control.Tenancy.Project(ctx, key, key.ProjectID)
	return project.Name, err
}

func (c ArrakisConfig) egress() string {
	if c.OpenEgress {
		return "open, because --arrakis-open-egress says so"
	}
	return "closed; --arrakis-open-egress opens it, as Arrakis does"
}
