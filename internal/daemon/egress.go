package daemon

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/host"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/runner/egress"
)

// EgressOptions are an operator's choices about what leaves sandboxes.
type EgressOptions struct {
	Off      bool           // nothing does, whatever a workspace's rules say
	Private  []netip.Prefix // networks that may be reached although they are not public, where rules name what is there
	Resolver string         // host:port of the name server that is asked; empty: the host's
	Servers  []string       // names of hosts that are this installation's: sandboxes do not reach them
	CAFile   string         // PEM: authorities of hosts that secrets are granted for, besides those that this host trusts
}

// egressDir is where the egress process has its socket, in the run directory, and what it keeps, in the data directory.
const egressDir = "egress"

// egressOf says how a runner's egress process is started: as this program. Without one, what an earlier runner has left is ended.
func (h *Host) egressOf(ctx context.Context, cfg HostConfig, uid uint32) (*egress.Process, error) {
	dir := filepath.Join(h.RunDir, egressDir)
	if cfg.Egress.Off {
		if err := egress.NewClient(egress.SocketPath(dir)).Stop(ctx); err != nil && !errors.Is(err, egress.ErrGone) {
			return nil, err
		}
		return nil, nil //nolint:nilnil // there is none
	}
	network := h.Pool.Config()
	ec := EgressConfig{
		Dir: dir, Spool: filepath.Join(cfg.DataDir, egressDir), Runner: uint32(os.Geteuid()), //nolint:gosec // G115: a user id
		Private: cfg.Egress.Private, Own: []netip.Prefix{network.Subnet, network.LinkSubnet}, Servers: cfg.Egress.Servers, Resolver: cfg.Egress.Resolver,
	}
	if cfg.Egress.CAFile != "" {
		text, err := os.ReadFile(cfg.Egress.CAFile)
		if err != nil {
			return nil, core.Wrapf(err, core.Invalid, core.CodeInvalidField, "--egress-ca-file: %v", err)
		}
		ec.CA = string(text)
		if _, err := ec.roots(); err != nil {
			return nil, err
		}
	}
	if os.Geteuid() == 0 {
		ec.UID = uid // VMs run as those above
	}
	if name := cfg.Store.server(); name != "" {
		ec.Servers = append(slices.Clone(ec.Servers), name)
	}
	config, err := json.Marshal(ec)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	return &egress.Process{Dir: dir, Command: []string{self, "egress"}, Config: config}, err
}

// EgressConfig says how the egress process of a runner runs. It comes as JSON from the runner that starts it, by a pipe.
type EgressConfig struct {
	Dir      string         `json:"dir"`                // for its socket
	Spool    string         `json:"spool"`              // directory; made if it is not there
	UID      uint32         `json:"uid"`                // that it becomes, and its group; 0: it stays who it is
	Runner   uint32         `json:"runner"`             // user of the runner
	MaxSpool int64          `json:"max_spool"`          // bytes; 0: the default
	Private  []netip.Prefix `json:"private"`            // see host.Config, as for the others
	Own      []netip.Prefix `json:"own"`                //
	Servers  []string       `json:"servers"`            //
	Resolver string         `json:"resolver,omitempty"` // host:port of the name server that is asked; empty: the host's
	CA       string         `json:"ca,omitempty"`       // PEM: authorities that are trusted besides the host's
}

// roots are the authorities that are trusted; nil for those of the host alone.
func (c EgressConfig) roots() (*x509.CertPool, error) {
	if c.CA == "" {
		return nil, nil //nolint:nilnil // the host's
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, err
	}
	if !pool.AppendCertsFromPEM([]byte(c.CA)) {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "--egress-ca-file: there is no certificate in PEM form in it")
	}
	return pool, nil
}

// RunEgress runs the egress process that config describes until ctx ends or its runner stops it. What needs the runner's privileges is done
// first; then they are given up for good.
func RunEgress(ctx context.Context, config io.Reader, log *slog.Logger) (err error) {
	var cfg EgressConfig
	if err := json.NewDecoder(config).Decode(&cfg); err != nil {
		return core.Wrapf(err, core.Invalid, core.CodeInvalidField, "the egress process is started by a runner, which tells it on its standard input what to do")
	}
	stdlog.SetOutput(io.Discard) // net/http's alone, which quotes there what hosts say that nobody has asked for
	RelaxGC()                    // little lives in it, and every request makes some garbage
	if err := os.MkdirAll(cfg.Spool, 0o700); err != nil {
		return err
	}
	spool, err := os.OpenRoot(cfg.Spool) // its user could not come here
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, spool.Close()) }()
	if cfg.UID != 0 {
		if err := give(spool, int(cfg.UID)); err != nil {
			return fmt.Errorf("give the spool of flows to user %d: %w", cfg.UID, err)
		}
	}
	listen, err := sidecar.Listen(sidecar.Process{Dir: cfg.Dir}.SocketPath())
	if err != nil {
		return fmt.Errorf("listen as an egress process: %w", err)
	}
	listen.SetUnlinkOnClose(false) // it may not, and the next one does
	if err := surrender(cfg.UID); err != nil {
		return errors.Join(fmt.Errorf("give up the runner's privileges: %w", err), listen.Close())
	}
	roots, err := cfg.roots()
	if err != nil {
		return errors.Join(err, listen.Close())
	}
	server, err := host.New(ctx, host.Config{
		Roots:  roots,
		Listen: listen, Spool: spool, Log: log, UID: cfg.Runner, MaxSpool: cfg.MaxSpool, Private: cfg.Private, Own: cfg.Own, Servers: cfg.Servers, Resolver: namesAt(cfg.Resolver), NamesAt: serversAt(cfg.Resolver),
	})
	if err != nil {
		return errors.Join(fmt.Errorf("open the egress process: %w", err), listen.Close())
	}
	return server.Run(ctx)
}

// give makes a directory and the files in it a user's.
func give(dir *os.Root, uid int) error {
	d, err := dir.Open(".")
	if err != nil {
		return err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, name := range names {
		err = errors.Join(err, dir.Lchown(name, uid, uid))
	}
	return errors.Join(err, dir.Chown(".", uid, uid))
}

// surrender makes this process another user's, who can do nothing with its memory but run it: no capabilities, no core dumps, no debuggers.
func surrender(uid uint32) error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return err
	}
	if uid != 0 { // of all threads; the kernel takes the capabilities with the user
		id := int(uid)
		if err := errors.Join(syscall.Setgroups(nil), syscall.Setresgid(id, id, id), syscall.Setresuid(id, id, id)); err != nil {
			return err
		}
	}
	return unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// serversAt are the name servers for sandboxes that may reach everything; nil: the host's.
func serversAt(server string) []string {
	if server == "" {
		return nil
	}
	return []string{server}
}

// namesAt asks one name server; without any it is the host's way.
func namesAt(server string) *net.Resolver {
	if server == "" {
		return net.DefaultResolver
	}
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, network, server)
	}}
}
