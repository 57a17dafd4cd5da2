package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/devstack"
	"github.com/coppice-dev/coppice/internal/tracing"
	"github.com/coppice-dev/coppice/runner/hostport"
)

func newDevCommand(a *app) *cobra.Command {
	cfg := devstack.Config{PGBin: a.getenv("PGBIN"), HostConfig: a.hostConfig()}
	var budget, level string
	c := &cobra.Command{
		Use:   "dev",
		Short: "Run controller, runner and a private PostgreSQL on this machine",
		Long: `Run everything on this machine, in one command: a private PostgreSQL, the controller with its REST API on a loopback address, and
a runner. It needs root, for network namespaces and for a user id per VM, but no KVM.

VMs run on cloud-hypervisor where it is installed ('make setup-kvm', or its path in COPPICE_CLOUD_HYPERVISOR) and really boots a guest under KVM,
else on QEMU (COPPICE_QEMU), with KVM where a guest boots under that. What was chosen, and why, is printed.

Ctrl-C stops the VMs. Checkpoints, images and the database stay in the data directory, and the next start shows them.`,
		Args: cobra.NoArgs,
	}
	f := c.Flags()
	f.StringVar(&cfg.DataDir, "data-dir", firstOf(a.getenv("COPPICE_DATA_DIR"), defaultDataDir), "`directory` for everything that is kept")
	f.StringVar(&cfg.ImagesDir, "images-dir", a.getenv("COPPICE_IMAGES_DIR"), "image store `directory` (default: images in the data directory)")
	f.StringVar(&cfg.Listen, "listen", "127.0.0.1:7070", "`address` of the API; port 0 picks a free one")
	f.StringVar(&budget, "disk-budget", "32G", "most that checkpoints may take where a volume of their own is made, as `size` with K, M, G or T")
	f.IntVar(&cfg.MaxSandboxes, "max-sandboxes", 64, "most VMs at a time, warm ones included")
	f.IntVar(&cfg.Warm, "warm", 4, "VMMs kept ready per base that was forked lately; 0 for none")
	vmmFlags(f, &cfg.HostConfig)
	a.storeFlags(f, &cfg.Store)
	a.secretFlags(f, &cfg.Secrets, true)
	readStore := hostStoreFlags(f, &cfg.Store)
	readEgress, readForward := egressFlags(f, &cfg.Egress), forwardFlags(f, &cfg.Forward)
	readLimits := vmLimitFlags(f, &cfg.HostConfig)
	cfg.WarnWeak = true
	f.BoolVar(&cfg.NoRebase, "no-rebase", false, "never turn a checkpoint's base and delta into a new base")
	f.StringVar(&cfg.Metrics, "metrics-listen", "", "loopback `address` of Prometheus metrics, under /metrics; empty for none")
	f.StringVar(&level, "log-level", "info", "debug, info, warn or error")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		daemon.RelaxGC()
		var err error
		if cfg.DiskBudget, err = parseSize(budget); err != nil {
			return usageError{fmt.Errorf("--disk-budget: %w", err)}
		}
		if err := errors.Join(readStore(), readEgress(), readForward(), readLimits()); err != nil {
			return err
		}
		if cfg.DataDir, err = filepath.Abs(cfg.DataDir); err != nil {
			return err
		}
		if cfg.Log, err = newLogger(a.stderr, level); err != nil {
			return usageError{fmt.Errorf("--log-level: %w", err)}
		}
		if err := cfg.ChooseVMM(cmd.Context()); err != nil {
			return err
		}
		traces, endTraces, err := tracing.Open(cmd.Context(), a.getenv, "coppice-dev")
		if err != nil {
			return err
		}
		defer func() { _ = endTraces(context.WithoutCancel(cmd.Context())) }() // what was not sent by now is lost
		cfg.Traces = traces
		return devstack.Run(cmd.Context(), cfg, func(r devstack.Ready) error {
			if err := a.saveConnection(connection{Server: r.Server, Token: r.Key}); err != nil {
				return err
			}
			return a.print(r, func(w io.Writer) error { return greet(w, cfg, r) })
		})
	}
	return c
}

func greet(w io.Writer, cfg devstack.Config, r devstack.Ready) error {
	_, err := fmt.Fprintf(w, `Coppice is ready at %s
  data     %s
  volume   %s
  VMs      %s
%s
Try, in another terminal as the same user:
  coppice image build              once
  coppice ws create --name demo
  coppice ws exec demo -- uname -a
  coppice fork demo -n 4
Ctrl-C stops the VMs; checkpoints stay.
`, r.Server, r.DataDir, r.Volume, cfg.VMMText(), warnings(r.Weak))
	return err
}

// hostConfig is what the environment says about how VMs run on this host. The flags of servers change it.
func (a *app) hostConfig() daemon.HostConfig {
	return daemon.HostConfig{
		Binary: a.getenv("COPPICE_QEMU"), CloudHypervisor: a.getenv("COPPICE_CLOUD_HYPERVISOR"),
		VMM: firstOf(a.getenv("COPPICE_VMM"), "auto"), Accelerator: firstOf(a.getenv("COPPICE_ACCEL"), "auto"),
	}
}

func vmmFlags(f *pflag.FlagSet, cfg *daemon.HostConfig) {
	f.StringVar(&cfg.VMM, "vmm", cfg.VMM, "qemu, cloud-hypervisor, or auto: cloud-hypervisor where a guest really boots under it (COPPICE_VMM)")
	f.StringVar(&cfg.Accelerator, "accel", cfg.Accelerator, "tcg, kvm, or auto: kvm where a guest really boots under it (COPPICE_ACCEL)")
}

// parseSize reads a number of bytes with an optional binary unit.
func parseSize(s string) (int64, error) {
	digits, unit := strings.TrimRight(s, "KMGT"), strings.TrimLeft(s, "0123456789")
	n, err := strconv.ParseInt(digits, 10, 64)
	shift, ok := map[string]int{"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[unit]
	if err != nil || !ok || n <= 0 || n > 1<<62>>shift {
		return 0, core.Errorf(core.Invalid, core.CodeInvalidField, "%q is not a size such as 512M or 32G", core.Clip(s))
	}
	return n << shift, nil
}

// newLogger writes text to a terminal and JSON elsewhere.
func newLogger(w io.Writer, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, err
	}
	o := &slog.HandlerOptions{Level: l}
	if f, ok := w.(*os.File); ok {
		if info, err := f.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			return slog.New(core.LogHandler(slog.NewTextHandler(w, o))), nil
		}
	}
	return slog.New(core.LogHandler(slog.NewJSONHandler(w, o))), nil
}

// storeFlags are those of every server. The credentials come from files or the environment, never from the command line.
func (a *app) storeFlags(f *pflag.FlagSet, cfg *daemon.StoreConfig) {
	cfg.AccessKey, cfg.SecretKey = a.getenv("COPPICE_STORE_ACCESS_KEY"), a.getenv("COPPICE_STORE_SECRET_KEY")
	f.StringVar(&cfg.URL, "store", a.getenv("COPPICE_STORE"), "where checkpoints are made durable, the same for all servers of a cluster: dir:/path or s3://bucket/prefix?endpoint=https://host&region=name, as a `URL` (default: nowhere but on their host)")
	f.StringVar(&cfg.AccessKeyFile, "store-access-key-file", a.getenv("COPPICE_STORE_ACCESS_KEY_FILE"), "`file` with the store's access key, instead of COPPICE_STORE_ACCESS_KEY")
	f.StringVar(&cfg.SecretKeyFile, "store-secret-key-file", a.getenv("COPPICE_STORE_SECRET_KEY_FILE"), "`file` with its secret key, instead of COPPICE_STORE_SECRET_KEY; both are read again when the store refuses them")
}

// secretFlags are those of servers that have a controller.
func (a *app) secretFlags(f *pflag.FlagSet, cfg *daemon.SecretsConfig, env bool) {
	cfg.Lookup = func(name string) (string, bool) {
		value := a.getenv(name)
		return value, value != ""
	}
	v := &cfg.Vault
	f.StringVar(&v.Address, "vault-addr", "", "`URL` of a HashiCorp Vault, https://host:port, that grants may name secrets in (vault://mount/path#field)")
	f.StringVar(&v.CAFile, "vault-ca-file", "", "`file` with its authorities, in PEM (default: the system's)")
	f.StringVar(&v.Namespace, "vault-namespace", "", "`namespace` in it")
	f.StringVar(&v.Prefix, "vault-prefix", "secret/coppice/{project}/", "what the secrets of a project are below, as a `path` with {project} for the project's id; it reads no others")
	f.StringVar(&v.TokenFile, "vault-token-file", "", "`file` with the controller's token there, read again each time; or")
	f.StringVar(&v.RoleIDFile, "vault-role-id-file", "", "`file` with its AppRole's role id, with")
	f.StringVar(&v.SecretIDFile, "vault-secret-id-file", "", "`file` with the secret id; or")
	f.StringVar(&v.KubernetesRole, "vault-kubernetes-role", "", "`role` of its Kubernetes login, with")
	f.StringVar(&v.KubernetesTokenFile, "vault-kubernetes-token-file", "", "`file` with the service account's token (default: where Kubernetes puts it)")
	f.StringVar(&v.AuthMount, "vault-auth-mount", "", "`path` where the login is mounted (default: approle or kubernetes)")
	f.BoolVar(&cfg.Env, "secret-env", env, "let grants of every project name variables of this process that begin with COPPICE_SECRET_ (env://COPPICE_SECRET_NAME): for development")
}

// hostStoreFlags are those of servers that have a runner. What it returns reads them.
func hostStoreFlags(f *pflag.FlagSet, cfg *daemon.StoreConfig) func() error {
	var bandwidth, cache, copies, floor, fetch string
	f.StringVar(&bandwidth, "store-bandwidth", "", "most that is sent to the store a second, as `size` with K, M, G or T (default: no bound)")
	f.StringVar(&cache, "cache-size", "10G", "most that is kept on this host of what was read from the store or sent to it, as `size` with K, M, G or T; 0 for nothing")
	f.StringVar(&copies, "copies-size", "", "most that checkpoints may take that were fetched from the store and can be fetched again, as `size` with K, M, G or T (default: half of the disk)")
	f.StringVar(&floor, "disk-floor", "", "free space of the runner's disk that no fetch of a checkpoint takes, as `size` with K, M, G or T (default: a sixteenth of the disk, at most 4G)")
	f.StringVar(&fetch, "fetch", "lazy", "how a checkpoint comes from the store: lazy, so that its VMs run before all of their memory is here, or whole")
	return func() (err error) {
		if fetch != "lazy" && fetch != "whole" {
			return usageError{fmt.Errorf("--fetch: %q is neither lazy nor whole", fetch)}
		}
		cfg.Whole = fetch == "whole"
		if cfg.Bandwidth, err = parseSizeOr(bandwidth, ""); err != nil {
			return usageError{fmt.Errorf("--store-bandwidth: %w", err)}
		}
		if cfg.CacheSize, err = parseSizeOr(cache, "0"); err != nil {
			return usageError{fmt.Errorf("--cache-size: %w", err)}
		}
		if cfg.CopiesSize, err = parseSizeOr(copies, ""); err != nil {
			return usageError{fmt.Errorf("--copies-size: %w", err)}
		}
		if cfg.Floor, err = parseSizeOr(floor, ""); err != nil {
			return usageError{fmt.Errorf("--disk-floor: %w", err)}
		}
		return nil
	}
}

// egressFlags are those of servers that have a runner. What it returns reads them.
func egressFlags(f *pflag.FlagSet, cfg *daemon.EgressOptions) func() error {
	var mode string
	var private []string
	f.StringVar(&mode, "egress", "on", "on: what the rules of a workspace allow leaves its sandboxes, through an egress process of this host; or off: nothing does")
	f.StringArrayVar(&private, "egress-allow-private", nil, "`network` in CIDR form that sandboxes may reach although it is not public, where their rules name what is there; may be repeated")
	f.StringVar(&cfg.CAFile, "egress-ca-file", "", "PEM `file` with authorities of hosts that secrets are granted for, besides those that this host trusts")
	f.StringVar(&cfg.Resolver, "egress-resolver", "", "`address` of the name server that is asked for names outside, host:port (default: as this host does)")
	return func() error {
		if mode != "on" && mode != "off" {
			return usageError{fmt.Errorf("--egress: %q is neither on nor off", mode)}
		}
		cfg.Off = mode == "off"
		for _, text := range private {
			p, err := netip.ParsePrefix(text)
			if err != nil {
				return usageError{fmt.Errorf("--egress-allow-private: %w", err)}
			}
			cfg.Private = append(cfg.Private, p.Masked())
		}
		return nil
	}
}

// forwardFlags are those of servers that have a runner. What it returns reads them.
func forwardFlags(f *pflag.FlagSet, cfg *hostport.Allowed) func() error {
	var addresses []string
	var ports string
	f.StringArrayVar(&addresses, "forward-address", nil, "`IP` address of this host that tenants may forward ports from; may be repeated, and requests without an address get the first one (default: 127.0.0.1 and ::1)")
	f.StringVar(&ports, "forward-ports", "", "range of `ports` that tenants may forward, FIRST-LAST from 1024 up; narrow it on a host that has other services (default: from 1024 up to the ports of outgoing connections, usually 1024-32767)")
	return func() (err error) {
		if *cfg, err = hostport.Parse(addresses, ports); err != nil {
			return usageError{fmt.Errorf("--forward-address, --forward-ports: %w", err)}
		}
		return nil
	}
}

// parseSizeOr reads a size, or zero as it is written for none.
func parseSizeOr(s, none string) (int64, error) {
	if s == none {
		return 0, nil
	}
	return parseSize(s)
}
