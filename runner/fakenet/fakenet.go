// Package fakenet is the network of a runner whose machines have none, for tests and measurements without root. Its namespaces hand
// out nothing, and nothing can be reached through them.
package fakenet

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner"
	"github.com/coppice-dev/coppice/runner/netns"
)

// Network implements runner.Network.
type Network struct{}

type namespace struct{}

var (
	_ runner.Network   = Network{}
	_ runner.Namespace = namespace{}

	errNone = errors.New("there is no network")
)

// Acquire returns the namespace that all machines have.
func (Network) Acquire(context.Context) (runner.Namespace, error) { return namespace{}, nil }

// Adopt returns the same.
func (Network) Adopt(context.Context, string, core.Identity, core.EgressPolicy) (runner.Namespace, error) {
	return namespace{}, nil
}

// Reconcile has nothing to remove.
func (Network) Reconcile(context.Context, map[string]bool) error { return nil }

// Gateway is none.
func (Network) Gateway() (netip.Addr, string) { return netip.Addr{}, "" }

// Resolvers are none.
func (Network) Resolvers(core.EgressPolicy) []netip.Addr { return nil }

func (namespace) Name() string                                  { return "none" }
func (namespace) NetNS() (*os.File, error)                      { return nil, nil } //nolint:nilnil // that of the process
func (namespace) TapFile(bool) (*os.File, error)                { return nil, nil } //nolint:nilnil // there is no tap
func (namespace) Assign(context.Context, core.Identity) error   { return nil }
func (namespace) Open(context.Context, core.EgressPolicy) error { return nil }
func (namespace) EgressSockets(context.Context) (netns.EgressSockets, error) {
	return netns.EgressSockets{}, errNone
}
func (namespace) Check(context.Context) error                            { return nil }
func (namespace) Release(context.Context) error                          { return nil }
func (namespace) Dial(context.Context, string, string) (net.Conn, error) { return nil, errNone }
