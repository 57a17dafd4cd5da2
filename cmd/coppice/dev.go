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

VMs run on cloud-hypervisor if it is installed ('make setup-kvm', or its path in COPPICE_CLOUD_HYPERVISOR) and really boots a guest under KVM.
Otherwise they run on QEMU (COPPICE_QEMU), with KVM if a guest boots under it. The command prints its choice and the reason.

Ctrl-C stops the VMs. Checkpoints, images and the database stay in the data directory for the next start.`,
		Args: cobra.NoArgs,
	}
	f := c.Flags()
	f.StringVar(&cfg.DataDir, "data-dir", firstOf(a.getenv("COPPICE_DATA_DIR"), defaultDataDir), "`directory` for all data")
	f.StringVar(&cfg.ImagesDir, "images-dir", a.getenv("COPPICE_IMAGES_DIR"), "image store `directory` (default: images in the data directory)")
	f.StringVar(&cfg.Listen, "listen", "127.0.0.1:7070", "`address` of the API; port 0 picks a free one")
	f.StringVar(&budget, "disk-budget", "32G", "size of the volume for checkpoints, if the program makes one, as `size` with K, M, G or T")
	f.IntVar(&cfg.MaxSandboxes, "max-sandboxes", 64, "maximum number of VMs, including warm ones")
	f.IntVar(&cfg.Warm, "warm", 4, "number of VMMs kept ready per recently forked base; 0 for none")
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
Try this in another terminal, as the same user:
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
	f.StringVar(&cfg.VMM, "vmm", cfg.VMM, "qemu, cloud-hypervisor, or auto: cloud-hypervisor if a guest really boots under it (COPPICE_VMM)")
	f.StringVar(&cfg.Accelerator, "accel", cfg.Accelerator, "tcg, kvm, or auto: kvm if a guest really boots under it (COPPICE_ACCEL)")
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
	f.StringVar(&cfg.URL, "store", a.getenv("COPPICE_STORE"), "`URL` of the store that makes checkpoints durable, the same for all servers of a cluster: dir:/path or s3://bucket/prefix?endpoint=https://host&region=name (default: none; checkpoints stay on their host)")
	f.StringVar(&cfg.AccessKeyFile, "store-access-key-file", a.getenv("COPPICE_STORE_ACCESS_KEY_FILE"), "`file` with the store's access key, instead of COPPICE_STORE_ACCESS_KEY")
	f.StringVar(&cfg.SecretKeyFile, "store-secret-key-file", a.getenv("COPPICE_STORE_SECRET_KEY_FILE"), "`file` with the store's secret key, instead of COPPICE_STORE_SECRET_KEY; both files are read again when the store refuses the keys")
}

// secretFlags are those of servers that have a controller.
func (a *app) secretFlags(f *pflag.FlagSet, cfg *daemon.SecretsConfig, env bool) {
	cfg.Lookup = func(name string) (string, bool) {
		value := a.getenv(name)
		return value, value != ""
	}
	v := &cfg.Vault
	f.StringVar(&v.Address, "vault-addr", "", "`URL` of a HashiCorp Vault, https://host:port; grants may name secrets in it (vault://mount/path#field)")
	f.StringVar(&v.CAFile, "vault-ca-file", "", "`file` with the certificate authorities of the Vault, in PEM (default: the system's)")
	f.StringVar(&v.Namespace, "vault-namespace", "", "`namespace` in the Vault")
	f.StringVar(&v.Prefix, "vault-prefix", "secret/coppice/{project}/", "`path` above the secrets of a project, with {project} for the project's id; the controller reads no others")
	f.StringVar(&v.TokenFile, "vault-token-file", "", "log in to the Vault with the token in this `file`, which is read again each time")
	f.StringVar(&v.RoleIDFile, "vault-role-id-file", "", "log in to the Vault by AppRole with the role id in this `file`; needs --vault-secret-id-file")
	f.StringVar(&v.SecretIDFile, "vault-secret-id-file", "", "`file` with the secret id for --vault-role-id-file")
	f.StringVar(&v.KubernetesRole, "vault-kubernetes-role", "", "log in to the Vault by Kubernetes with this `role`")
	f.StringVar(&v.KubernetesTokenFile, "vault-kubernetes-token-file", "", "`file` with the service account's token for --vault-kubernetes-role (default: where Kubernetes puts it)")
	f.StringVar(&v.AuthMount, "vault-auth-mount", "", "`path` at which the Vault has the login mounted (default: approle or kubernetes)")
	f.BoolVar(&cfg.Env, "secret-env", env, "for development: let grants of every project use variables of this process that begin with COPPICE_SECRET_ (env://COPPICE_SECRET_NAME)")
}

// hostStoreFlags are those of servers that have a runner. What it returns reads them.
func hostStoreFlags(f *pflag.FlagSet, cfg *daemon.StoreConfig) func() error {
	var bandwidth, cache, copies, floor, fetch string
	f.StringVar(&bandwidth, "store-bandwidth", "", "maximum upload to the store per second, as `size` with K, M, G or T (default: no limit)")
	f.StringVar(&cache, "cache-size", "10G", "maximum size of this host's cache of the store, as `size` with K, M, G or T; 0 for no cache")
	f.StringVar(&copies, "copies-size", "", "maximum disk space for checkpoints that were fetched from the store, as `size` with K, M, G or T (default: half of the disk)")
	f.StringVar(&floor, "disk-floor", "", "free disk space that fetches of checkpoints never use, as `size` with K, M, G or T (default: a sixteenth of the disk, at most 4G)")
	f.StringVar(&fetch, "fetch", "lazy", "how to fetch a checkpoint from the store: lazy (its VMs run before all of their memory has arrived) or whole")
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
	f.StringVar(&mode, "egress", "on", "on: sandboxes may send what the rules of their workspace allow, through an egress process of this host; off: they may send nothing")
	f.StringArrayVar(&private, "egress-allow-private", nil, "`network` in CIDR form that is not public; sandboxes may reach its hosts if their rules name them; may be repeated")
	f.StringVar(&cfg.CAFile, "egress-ca-file", "", "PEM `file` with further certificate authorities to trust for the hosts of grants")
	f.StringVar(&cfg.Resolver, "egress-resolver", "", "`address` of the name server for names outside, host:port (default: that of this host)")
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
	f.StringArrayVar(&addresses, "forward-address", nil, "`IP` address of this host on which tenants may forward ports; may be repeated; a request without an address gets the first one (default: 127.0.0.1 and ::1)")
	f.StringVar(&ports, "forward-ports", "", "range of `ports` that tenants may use for forwarding, FIRST-LAST from 1024 up; narrow it on a host with other services (default: from 1024 up to the ports of outgoing connections, usually 1024-32767)")
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
