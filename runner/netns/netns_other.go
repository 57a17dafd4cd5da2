//go:build !linux

package netns

import (
	"context"
	"net"
	"net/netip"
	"os"

	"github.com/coppice-dev/coppice/core"
)

// Pool exists on Linux only; NewPool fails elsewhere, so its methods are never reached.
type Pool struct{}

// Namespace exists on Linux only.
type Namespace struct{}

// Stats counts the namespaces of a pool.
type Stats struct{ Idle, Used, Dirty, Busy int }

var errLinuxOnly = core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost, "sandboxes run on Linux only")

// NewPool fails: network namespaces exist on Linux only.
func NewPool(Config) (*Pool, error) { return nil, errLinuxOnly }

// Config returns the zero configuration.
func (*Pool) Config() Config { return Config{} }

// Stats returns zeroes.
func (*Pool) Stats() Stats { return Stats{} }

// Run fails.
func (*Pool) Run(context.Context) error { return errLinuxOnly }

// Acquire fails.
func (*Pool) Acquire(context.Context) (*Namespace, error) { return nil, errLinuxOnly }

// Adopt fails.
func (*Pool) Adopt(context.Context, string) (*Namespace, error) { return nil, errLinuxOnly }

// Reconcile fails.
func (*Pool) Reconcile(context.Context, map[string]bool) error { return errLinuxOnly }

// Close fails.
func (*Pool) Close(context.Context) error { return errLinuxOnly }

// Name is empty.
func (*Namespace) Name() string { return "" }

// Path is empty.
func (*Namespace) Path() string { return "" }

// FD is no descriptor.
func (*Namespace) FD() int { return -1 }

// Do fails.
func (*Namespace) Do(func() error) error { return errLinuxOnly }

// TapFile fails.
func (*Namespace) TapFile(bool) (*os.File, error) { return nil, errLinuxOnly }

// Assign fails.
func (*Namespace) Assign(context.Context, core.Identity) error { return errLinuxOnly }

// Open fails.
func (*Namespace) Open(context.Context, core.EgressPolicy) error { return errLinuxOnly }

// Shut fails.
func (*Namespace) Shut(context.Context) error { return errLinuxOnly }

// Check fails.
func (*Namespace) Check(context.Context) error { return errLinuxOnly }

// Release fails.
func (*Namespace) Release(context.Context) error { return errLinuxOnly }

// Counters fails.
func (*Namespace) Counters(context.Context) (map[string]uint64, error) { return nil, errLinuxOnly }

// Dial fails.
func (*Namespace) Dial(context.Context, string, string) (net.Conn, error) { return nil, errLinuxOnly }

// Listen fails.
func (*Namespace) Listen(context.Context, string, string) (net.Listener, error) {
	return nil, errLinuxOnly
}

// EgressSockets are those of a namespace on Linux.
type EgressSockets struct{ Proxy, Intercepted, ResolverTCP, ResolverUDP *os.File }

// Files are none.
func (EgressSockets) Files() []*os.File { return nil }

// Close does nothing.
func (EgressSockets) Close() error { return nil }

// EgressSockets fails.
func (*Namespace) EgressSockets(context.Context) (EgressSockets, error) {
	return EgressSockets{}, errLinuxOnly
}

// Identity is none.
func (*Namespace) Identity() (string, netip.Addr, bool) { return "", netip.Addr{}, false }

// IsOpen is false.
func (*Namespace) IsOpen() (core.EgressPolicy, bool) { return "", false }
