package daemon

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pass"
	"github.com/coppice-dev/coppice/internal/undo"
	"github.com/coppice-dev/coppice/runner/heartbeat"
	runnerhttp "github.com/coppice-dev/coppice/runner/httpapi"
	"github.com/coppice-dev/coppice/runner/writelog"
)

// RunnerConfig says how a runner runs.
type RunnerConfig struct {
	HostConfig

	Controllers []string // https://host:port of the controllers' listeners for runners
	JoinToken   string   // for the first start, or after the certificate was lost
	Listen      string   // host:port for controllers
	Endpoint    string   // https://host:port under which controllers reach that; empty: found out
	DataListen  string   // host:port for users' streams and files; empty: they go through the controllers
	DataURL     string   // https://host:port under which users reach that; empty: found out
	DataCert    string   // PEM files for that; empty: the runner's own certificate, whose authority users get with each pass
	DataKey     string
	Metrics     string // host:port of the metrics, on loopback; empty: nowhere
}

// RunnerReady is what a user needs to know once the runner has registered.
type RunnerReady struct {
	RunnerID core.RunnerID `json:"runner_id"`
	Endpoint string        `json:"endpoint"`
	DataURL  string        `json:"data_url,omitempty"`
	Volume   string        `json:"volume"`
	Weak     []string      `json:"weak,omitempty"`    // what keeps guests apart less well than it could
	Metrics  string        `json:"metrics,omitempty"` // host:port
}

func (c RunnerConfig) validate() error {
	var errs []error
	bad := func(format string, a ...any) {
		errs = append(errs, core.Errorf(core.Invalid, core.CodeInvalidField, format, a...))
	}
	if len(c.Controllers) == 0 {
		bad("--controller: the https://host:port of a controller's listener for runners is needed")
	}
	if (c.DataCert == "") != (c.DataKey == "") {
		bad("--data-cert and --data-key go together")
	}
	if c.DataListen == "" && c.DataURL+c.DataCert != "" {
		bad("--data-url and --data-cert are for a data plane; give --data-listen too")
	}
	return errors.Join(errs...)
}

// RunRunner runs a runner until ctx ends. It needs root.
func RunRunner(ctx context.Context, cfg RunnerConfig, ready func(RunnerReady) error) (err error) {
	if err := cfg.validate(); err != nil {
		return err
	}
	if os.Geteuid() != 0 && cfg.Machines == nil {
		return core.Errorf(core.PermissionDenied, core.CodeUnsupported,
			"coppice runner needs root: it makes network namespaces and runs every VM under a user of its own; run it with sudo")
	}
	var steps undo.Stack
	defer func() { err = errors.Join(err, steps.Undo(ctx)) }()
	if err := lockData(cfg.DataDir, "coppice runner", &steps); err != nil {
		return err
	}
	member, err := membership(ctx, cfg)
	if err != nil {
		return err
	}
	// Runners of one cluster may share a host: the mark says what each has made there.
	metrics, err := OpenMetrics(ctx, cfg.Metrics, cfg.Log)
	if err != nil {
		return err
	}
	steps.Push("metrics", func(context.Context) error { return metrics.Close() })
	cfg.Registry = metrics
	others := newPeerClient(member.Identity)
	steps.Push("connections to other runners", func(context.Context) error { others.close(); return nil })
	cfg.Store.Peers, cfg.Store.Member = others, filepath.Join(cfg.DataDir, memberFile)
	for _, c := range cfg.Controllers {
		if u, err := url.Parse(c); err == nil && u.Hostname() != "" {
			cfg.Egress.Servers = append(cfg.Egress.Servers, u.Hostname())
		}
	}
	host, err := OpenHost(ctx, cfg.HostConfig, member.RunnerID, member.ClusterID+"/"+string(member.RunnerID), &steps)
	if err != nil {
		return fmt.Errorf("open the runner: %w", err)
	}
	passes, admitted := pass.NewVerifier(member.RunnerID), runnerhttp.NewPeers()
	inner, err := listenTLS(ctx, cfg.Listen, "listen", member.Identity.Server(), runnerhttp.NewTLS(host.Runner, host.Pulls, admitted, cfg.Log.With("component", "runner")), cfg.Log)
	if err != nil {
		return err
	}
	steps.Push("controllers' listener", func(context.Context) error { return inner.close() })
	if cfg.Endpoint, err = orReachable(cfg.Endpoint, inner); err != nil {
		return err
	}
	parts := []part{}
	var plane heartbeat.Plane
	if cfg.DataListen != "" {
		writes, err := writelog.Open(filepath.Join(cfg.DataDir, writesFile), member.RunnerID, cfg.Log.With("component", "data"))
		if err != nil {
			return fmt.Errorf("open the log of writes by pass: %w", err)
		}
		steps.Push("log of writes by pass", func(context.Context) error { return writes.Close() })
		h := runnerhttp.NewData(host.Runner, passes, writes, cfg.Log.With("component", "data"))
		plane = h
		data, err := listenData(ctx, cfg, member, h)
		if err != nil {
			return err
		}
		steps.Push("data plane", func(context.Context) error { return data.close() })
		if cfg.DataURL, err = orReachable(cfg.DataURL, data); err != nil {
			return err
		}
		parts = append(parts, part{"data plane", served(data)})
	}
	link, err := heartbeat.New(host.Runner, heartbeat.Config{
		Controllers: cfg.Controllers, Member: member, Endpoint: cfg.Endpoint, DataURL: cfg.DataURL, OwnDataCert: cfg.DataCert == "", Plane: plane, Passes: passes, Peers: admitted, Log: cfg.Log.With("component", "heartbeat"),
	})
	if err != nil {
		return err
	}
	sealing := func(ctx context.Context) error { return host.Runner.Seal(ctx, link, link.Epoch) }
	parts = append(parts, part{"sealing", sealing}, part{"flows", link.Deliver}, part{"metrics", metrics.Run}, part{"runner", host.Run})
	if host.Pool != nil {
		parts = append(parts, part{"namespaces", host.Pool.Run})
	}
	parts = append(parts, part{"heartbeat", link.Run}, part{"controllers' listener", served(inner)}, part{"ready", func(ctx context.Context) error {
		select {
		case <-ctx.Done():
			return nil
		case <-link.Registered():
		}
		if err := ready(RunnerReady{RunnerID: member.RunnerID, Endpoint: cfg.Endpoint, DataURL: cfg.DataURL, Volume: host.Volume, Weak: host.Weak, Metrics: metrics.Address()}); err != nil {
			return err
		}
		<-ctx.Done()
		return nil
	}})
	return runInOrder(ctx, parts...)
}

func orReachable(given string, l *listener) (string, error) {
	if given != "" {
		return given, nil
	}
	address, err := l.reachable()
	return "https://" + address, err
}

// memberFile keeps the membership, in the data directory.
const memberFile = "member.json"

// writesFile keeps the writes by pass that no controller has recorded, in the data directory.
const writesFile = "writes.log"

// NeedsToken says whether a runner on this data directory can start only with a join token, and which runner it is already: none
// where it has not joined yet.
func NeedsToken(dataDir string) (needed bool, id core.RunnerID, err error) {
	member, found, err := heartbeat.Load(filepath.Join(dataDir, memberFile))
	switch {
	case err == nil && !found:
		return true, "", nil
	case found && core.CodeOf(err) == core.CodeCertificateRefused:
		return true, member.RunnerID, nil
	case err != nil:
		return false, "", err
	}
	return false, member.RunnerID, nil
}

// membership is the one that was kept, or a new one by the token. A kept one wins, so that a token may stay in a
// configuration; a token is for a runner whose certificate has expired, too.
func membership(ctx context.Context, cfg RunnerConfig) (*heartbeat.Member, error) {
	path := filepath.Join(cfg.DataDir, memberFile)
	member, found, err := heartbeat.Load(path)
	if found && (err == nil || core.CodeOf(err) != core.CodeCertificateRefused || cfg.JoinToken == "") {
		return member, err
	}
	if err != nil && !found {
		return nil, err
	}
	if cfg.JoinToken == "" {
		return nil, core.Errorf(core.Unauthenticated, core.CodeJoinTokenRefused,
			"this runner has not joined a cluster; make a token with `coppice runner-token create` and start it with --join-token-file")
	}
	fresh, err := heartbeat.Join(ctx, cfg.Controllers, cfg.JoinToken, path)
	if err != nil {
		return nil, fmt.Errorf("join the cluster: %w", err)
	}
	if found && fresh.RunnerID != member.RunnerID {
		cfg.Log.WarnContext(ctx, "the token made this host another runner; what the old one held is not reachable as it", "old", member.RunnerID, "new", fresh.RunnerID)
	}
	return fresh, nil
}

func listenData(ctx context.Context, cfg RunnerConfig, member *heartbeat.Member, h *runnerhttp.Data) (*listener, error) {
	var secure *tls.Config
	if cfg.DataCert == "" {
		secure = member.Identity.Open()
	} else {
		cert, err := openCertFile(cfg.DataCert, cfg.DataKey)
		if err != nil {
			return nil, err
		}
		secure = cert.config()
	}
	return listenTLS(ctx, cfg.DataListen, "data-listen", secure, strict(h), cfg.Log)
}

// lockData makes a data directory and keeps a second process off it.
func lockData(dir, who string, steps *undo.Stack) error {
	if err := os.MkdirAll(dir, 0o711); err != nil { //nolint:gosec // G301: the VMs' users must pass
		return err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return errors.Join(core.Wrapf(err, core.Conflict, core.CodeStateConflict,
			"another %s runs on %s; stop it, or give this one another --data-dir", who, dir), lock.Close())
	}
	steps.Push("lock", func(context.Context) error {
		// A child process that is between fork and exec has a copy of the file: closing alone would leave it the lock.
		return errors.Join(unix.Flock(int(lock.Fd()), unix.LOCK_UN), lock.Close())
	})
	return nil
}
