package explore

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/host"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/runner/egress"
	"github.com/coppice-dev/coppice/runner/netns"
	"github.com/coppice-dev/coppice/runner/sandboxnet"
)

// network has namespaces that are nothing but a count, and sockets on the loopback device.
type network struct{ spaces *atomic.Int64 }

// Acquire implements sandboxnet.Network.
func (n network) Acquire(context.Context) (sandboxnet.Namespace, error) {
	n.spaces.Add(1)
	return &namespace{network: n}, nil
}

// Adopt implements sandboxnet.Network. There is nothing from before.
func (network) Adopt(context.Context, string, core.Identity, core.EgressPolicy) (sandboxnet.Namespace, error) {
	return nil, errors.New("there is no such namespace")
}

// Reconcile implements sandboxnet.Network.
func (network) Reconcile(context.Context, map[string]bool) error { return nil }

// Gateway implements sandboxnet.Network.
func (network) Gateway() (netip.Addr, string) {
	return netip.AddrFrom4([4]byte{169, 254, 0, 1}), "02:00:00:00:00:01"
}

// Resolvers implements sandboxnet.Network.
func (network) Resolvers(core.EgressPolicy) []netip.Addr { return nil }

type namespace struct {
	network
	released atomic.Bool
}

func (*namespace) Name() string                                  { return "none" }
func (*namespace) NetNS() (*os.File, error)                      { return nil, nil } //nolint:nilnil // that of the process
func (*namespace) TapFile(bool) (*os.File, error)                { return nil, nil } //nolint:nilnil // there is no tap
func (*namespace) Assign(context.Context, core.Identity) error   { return nil }
func (*namespace) Open(context.Context, core.EgressPolicy) error { return nil }
func (*namespace) Check(context.Context) error                   { return nil }
func (s *namespace) Release(context.Context) error {
	if !s.released.Swap(true) {
		s.spaces.Add(-1)
	}
	return nil
}

func (*namespace) Dial(context.Context, string, string) (net.Conn, error) {
	return nil, errors.New("there is no network")
}

// EgressSockets implements sandboxnet.Namespace.
func (*namespace) EgressSockets(ctx context.Context) (out netns.EgressSockets, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, out.Close())
		}
	}()
	for _, f := range []**os.File{&out.Proxy, &out.Intercepted, &out.ResolverTCP} {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", "127.0.0.1:0")
		if err != nil {
			return out, err
		}
		*f, err = l.(*net.TCPListener).File()
		if err = errors.Join(err, l.Close()); err != nil {
			return out, err
		}
	}
	u, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp4", "127.0.0.1:0")
	if err != nil {
		return out, err
	}
	out.ResolverUDP, err = u.(*net.UDPConn).File()
	return out, errors.Join(err, u.Close())
}

// beAnEgressProcess is the argument with which this test binary is an egress process.
const beAnEgressProcess = "be-an-egress-process"

// carry is an egress process. Nothing can be reached through it.
func carry() error {
	dir, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	path := filepath.Join(string(dir), "spool")
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	spool, err := os.OpenRoot(path)
	if err != nil {
		return err
	}
	listen, err := sidecar.Listen(egress.SocketPath(string(dir)))
	if err != nil {
		return err
	}
	server, err := host.New(context.Background(), host.Config{Listen: listen, Spool: spool, UID: uint32(os.Geteuid()), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	return server.Run(context.Background())
}

// carrier says how the egress process of the runner is started, and how to ask it.
func (w *world) carrier() (*egress.Process, error) {
	dir, err := os.MkdirTemp("", "egress") // the path of a socket must be short
	if err != nil {
		return nil, err
	}
	w.after(func() { _ = os.RemoveAll(dir) })
	w.egress = egress.NewClient(egress.SocketPath(dir))
	return &egress.Process{Dir: dir, Command: []string{os.Args[0], beAnEgressProcess}, Config: []byte(dir)}, nil
}

// vault wraps keys by writing them down.
type vault struct{}

// Current implements controller.Wrapper.
func (vault) Current() string { return "v" }

// Wrap implements controller.Wrapper.
func (vault) Wrap(_ context.Context, name string, key core.DataKey) ([]byte, error) {
	return append([]byte(name+" "), key[:]...), nil
}

// Unwrap implements controller.Wrapper.
func (vault) Unwrap(_ context.Context, _, name string, wrapped []byte) (core.DataKey, error) {
	b, ok := bytes.CutPrefix(wrapped, []byte(name+" "))
	if !ok {
		return core.DataKey{}, io.ErrUnexpectedEOF
	}
	return core.DataKey(b), nil
}
