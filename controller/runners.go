package controller

import (
	"context"
	"io"
	"net/http"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/fleet"
	"github.com/coppice-dev/coppice/controller/forkcall"
	"github.com/coppice-dev/coppice/controller/ports"
	"github.com/coppice-dev/coppice/controller/prepare"
	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/controller/transfer"
	"github.com/coppice-dev/coppice/controller/tree"
	"github.com/coppice-dev/coppice/core"
)

// Runners calls runners by their endpoint (http://host:port or unix:/path). Every call has a deadline of its own besides the
// context's. If a runner cannot be reached, or vanishes during the call, the error is Unavailable, RUNNER_UNREACHABLE: the outcome is
// then unknown. The call may be repeated, because all calls are idempotent by the ids in them. If a runner refuses a call, the error
// is the runner's core error. Runners is safe for concurrent use.
type Runners interface {
	fleet.Runners
	forkcall.Runners
	ports.Runners
	prepare.Runners
	previews.Runners
	transfer.Runners
	tree.Runners
	Template(ctx context.Context, endpoint string, t runnerapi.Template) (runnerapi.Checkpoint, error)
	Capture(ctx context.Context, endpoint string, sandbox core.SandboxID, c runnerapi.Capture) (runnerapi.Checkpoint, error)
	// SetEgress replaces what a sandbox may reach. Rules that are older than the present ones change nothing.
	SetEgress(ctx context.Context, endpoint string, sandbox core.SandboxID, rules runnerapi.EgressRules) error
	// Console returns the tail of a serial console. The caller closes it.
	Console(ctx context.Context, endpoint string, sandbox core.SandboxID) (io.ReadCloser, error)
	// Guest carries requests to the agent in a sandbox; their paths are those of the agent ("/v1/sessions"). It has no deadline of
	// its own, so streams and WebSockets work. Its errors are core errors. It does not change the answers of the guest.
	Guest(endpoint string, sandbox core.SandboxID) http.RoundTripper
}
