// Package fakenet is a network for runners whose machines have none, for tests and measurements without root. Its namespaces have no tap
// and no address, and nothing can be reached through them.
package fakenet

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/netns"
	"github.com/coppice-dev/coppice/runner/sandboxnet"
)

// Network implements sandboxnet.Network.
type Network struct{}

type namespace struct{}

var (
	_ sandboxnet.Network   = Network{}
	_ sandboxnet.Namespace = namespace{}

	errNone = errors.New("there is no network")
)

// Acquire returns the same empty namespace for all machines.
func (Network) Acquire(context.Context) (sandboxnet.Namespace, error) { return namespace{}, nil }

// Adopt returns the same empty namespace.
func (Network) Adopt(context.Context, string, core.Identity, core.EgressPolicy) (sandboxnet.Namespace, error) {
	return namespace{}, nil
}

// Reconcile does nothing: there is nothing to remove.
func (Network) Reconcile(context.Context, map[string]bool) error { return nil }

// Gateway returns nothing: there is no gateway.
func (Network) Gateway() (netip.Addr, string) { return netip.Addr{}, "" }

// Resolvers returns nothing: there are no resolvers.
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
