package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/hostcheck"
	"github.com/coppice-dev/coppice/internal/tracing"
)

func newControllerCommand(a *app) *cobra.Command {
	cfg := daemon.ControllerConfig{}
	var databaseFile, level string
	c := &cobra.Command{
		Use:   "controller",
		Short: "Run a controller: the REST API, over a PostgreSQL database, for runners on other hosts",
		Long: `Run a controller: the REST API, over a PostgreSQL database, for runners on other hosts. Several may run over one database.

The first controller of a database makes the key file, which seals the cluster's keys there; the others need a copy of it. Whoever
has both the file and the database can make himself a runner: keep them apart, and back both up.

It does not start on a database server that can lose acknowledged work when it or its host crashes (fsync, full_page_writes or synchronous_commit
is off), unless --allow-weak-database names each setting. It starts on a server without a synchronous standby, and says what a failover can lose.

Runners connect to --runner-listen with a certificate of the cluster, which they get for a token of 'coppice runner-token create'.
Every flag can come from the environment: --runner-listen from COPPICE_RUNNER_LISTEN, and so on. SIGTERM ends it in order:
no more requests, then the operations end or are left to the next controller.`,
		Example: `  coppice controller --database postgres://coppice@db/coppice --key-file /etc/coppice/cluster.key --api-key-file /etc/coppice/api.key \
    --listen 0.0.0.0:7070 --tls-cert api.pem --tls-key api.key --runner-listen 0.0.0.0:7071`,
		Args: cobra.NoArgs,
	}
	f := c.Flags()
	f.StringVar(&cfg.Database, "database", "", "PostgreSQL `address`, as a URL or key=value pairs; a password is better in --database-file or PGPASSFILE")
	f.StringVar(&databaseFile, "database-file", "", "`file` that holds the address, instead of --database")
	f.DurationVar(&cfg.DatabaseWait, "database-wait", time.Minute, "how long to wait for the database at the start")
	f.StringSliceVar(&cfg.AllowWeak, "allow-weak-database", nil, "start although these `settings` of the database server are off, so that its crash can lose acknowledged work: "+strings.Join(postgres.DurabilitySettings(), ","))
	f.StringVar(&cfg.Listen, "listen", "127.0.0.1:7070", "`address` of the API; port 0 picks a free one")
	f.StringVar(&cfg.TLSCert, "tls-cert", "", "certificate `file` of the API, in PEM; read again when it changes")
	f.StringVar(&cfg.TLSKey, "tls-key", "", "its key `file`")
	f.BoolVar(&cfg.PlainHTTP, "plain-http", false, "serve the API in clear beyond loopback: only behind a proxy that speaks TLS")
	f.StringVar(&cfg.RunnerListen, "runner-listen", "127.0.0.1:7071", "`address` for runners, always with mutual TLS")
	f.StringVar(&cfg.KeyFile, "key-file", "", "`file` of the key that seals the cluster's keys in the database; made by the first controller")
	f.StringVar(&cfg.MasterKeys, "master-key-file", "", "`file` of the master keys that wrap the keys of projects that encrypt their checkpoints, one a line in hex, the present one first")
	a.storeFlags(f, &cfg.Store)
	a.secretFlags(f, &cfg.Secrets, false)
	f.DurationVar(&cfg.Tune.StoreGrace, "store-grace", time.Hour, "how long what nothing needs any more stays in the store: longer than a runner may work without hearing of it")
	f.StringVar(&cfg.APIKeyFile, "api-key-file", "", "`file` of the first administrator's API key; made if it is not there")
	f.DurationVar(&cfg.Tune.AttestationsKept, "attestation-retention", controller.AttestationsKept, "how long to keep attestations of reseals, by whole months; the same on all controllers")
	f.StringVar(&cfg.JoinKeyFile, "join-key-file", "", "`file` with an API key that only makes join tokens (scope runner:join), for scripts that start runners; created if it does not exist")
	f.BoolVar(&cfg.Tune.AllowAllEgress, "allow-all-egress", false, "allow the egress policy allow-all, under which sandboxes reach everything that this network reaches; 'coppice project quota --allow-all-egress' overrides it for a project")
	f.DurationVar(&cfg.Tune.FlowsKept, "flow-retention", controller.FlowsKept, "how long what sandboxes sent out is kept, by whole months; the same on all controllers")
	q := &cfg.Tune.FlowQuota
	f.Int64Var(&q.Reads.Workspace, "flow-rows", controller.FlowsOfWorkspace, "most `rows` of read-only requests of a workspace; further ones are counted by minute and host")
	f.Int64Var(&q.Reads.Project, "flow-rows-project", controller.FlowsOfProject, "most `rows` of read-only requests of all workspaces of a project")
	f.Int64Var(&q.Denied.Workspace, "flow-rows-denied", controller.DeniedOfWorkspace, "most `rows` of denied flows of a workspace; a project has five times as many")
	f.Int64Var(&q.Effects.Workspace, "flow-rows-effects", controller.EffectsOfWorkspace, "most `rows` of flows of a workspace that may have changed something; a project has ten times as many")
	f.DurationVar(&cfg.Tune.RunnerLease, "runner-lease", 15*time.Second, "how long a silent runner still gets work; the same on all controllers")
	f.DurationVar(&cfg.Tune.RunnerFence, "runner-fence", 10*time.Minute, "how long after that its workspaces are lost: it has ended their VMs by then")
	f.StringVar(&cfg.Metrics, "metrics-listen", "", "loopback `address` of Prometheus metrics, under /metrics; empty for none")
	f.StringVar(&level, "log-level", "info", "debug, info, warn or error")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := a.fromEnvironment(cmd); err != nil {
			return err
		}
		var err error
		if cfg.Database, err = databaseAddress(cfg.Database, databaseFile); err != nil {
			return err
		}
		if cfg.Log, err = newLogger(a.stderr, level); err != nil {
			return usageError{fmt.Errorf("--log-level: %w", err)}
		}
		traces, endTraces, err := tracing.Open(cmd.Context(), a.getenv, "coppice-controller")
		if err != nil {
			return err
		}
		defer func() { _ = endTraces(context.WithoutCancel(cmd.Context())) }() // what was not sent by now is lost
		cfg.Tune.Traces = traces
		daemon.RelaxGC()
		return daemon.RunController(cmd.Context(), cfg, func(r daemon.ControllerReady) error {
			return a.print(r, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "Coppice's controller is ready at %s\n  for runners   %s\n  cluster       %s\n  database      %s\n", r.Server, r.Runners, r.ClusterID, r.Database.Promise)
				return err
			})
		})
	}
	return c
}

// databaseAddress is the one of the two that was given.
func databaseAddress(address, file string) (string, error) {
	if file == "" {
		return address, nil
	}
	if address != "" {
		return "", usageError{errors.New("--database and --database-file exclude one another")}
	}
	return readSecret(file)
}

func newRunnerCommand(a *app) *cobra.Command {
	cfg := daemon.RunnerConfig{HostConfig: a.hostConfig()}
	var tokenFile, budget, level string
	var stop bool
	c := &cobra.Command{
		Use:   "runner",
		Short: "Run a runner: the virtual machines of this host, for a controller",
		Long: `Run a runner: the virtual machines of this host, for a controller. It needs root, for network namespaces and for a user id per VM, but no KVM.

The first start spends a token of 'coppice runner-token create' and keeps a certificate in the data directory; later starts need none. The
certificate is good for a day and renewed all the time. A runner that was off for longer needs another token, made with --runner.

VMs run on cloud-hypervisor where it is installed ('make setup-kvm', or its path in COPPICE_CLOUD_HYPERVISOR) and really boots a guest under KVM,
else on QEMU (COPPICE_QEMU), with KVM where a guest boots under that. What was chosen, and why, is printed and logged.

It does not start on a host with weak isolation between guests (swap, merged pages, unmitigated faults of the processor, missing cgroup
controllers), unless --allow-weak-host names each weakness. 'coppice doctor' lists them with their cures.

The VMs outlive this process, however it ends: the next one on the same data directory takes them over, and with them their sessions. They keep
the VMM that they were started with, whatever the next one uses. Only when the controllers have been silent for longer than they allow are they
ended; or with --stop-vms, when the process is told to stop.

With --data-listen, users' terminals and files come straight to this runner, with a pass of the API, and load no controller.
Every flag can come from the environment: --join-token-file from COPPICE_JOIN_TOKEN_FILE, and so on.`,
		Example: `  coppice runner-token create > /etc/coppice/join-token
  coppice runner --controller https://ctl-1:7071 --controller https://ctl-2:7071 --join-token-file /etc/coppice/join-token --listen 0.0.0.0:7072`,
		Args: cobra.NoArgs,
	}
	f := c.Flags()
	f.StringArrayVar(&cfg.Controllers, "controller", nil, "`URL` of a controller's listener for runners, https://host:port; may be repeated, the next is tried when one is away")
	f.StringVar(&tokenFile, "join-token-file", "", "`file` with a join token; not read again once the runner has joined")
	f.StringVar(&cfg.Listen, "listen", "127.0.0.1:7072", "`address` for controllers, always with mutual TLS")
	f.StringVar(&cfg.Endpoint, "endpoint", "", "`URL` under which controllers reach that, https://host:port (default: the address, or this host's name where it is 0.0.0.0)")
	f.StringVar(&cfg.DataListen, "data-listen", "", "`address` for users' streams and files (default: they go through the controllers)")
	f.StringVar(&cfg.DataURL, "data-url", "", "`URL` under which users reach that, https://host:port (default as for --endpoint)")
	f.StringVar(&cfg.DataCert, "data-cert", "", "certificate `file` for that, in PEM (default: the runner's own; the API tells users its authority)")
	f.StringVar(&cfg.DataKey, "data-key", "", "its key `file`")
	f.StringVar(&cfg.DataDir, "data-dir", firstOf(a.getenv("COPPICE_DATA_DIR"), defaultDataDir), "`directory` for everything that is kept")
	f.StringVar(&cfg.ImagesDir, "images-dir", a.getenv("COPPICE_IMAGES_DIR"), "image store `directory` (default: images in the data directory)")
	f.StringVar(&budget, "disk-budget", "32G", "most that checkpoints may take where a volume of their own is made, as `size` with K, M, G or T")
	f.IntVar(&cfg.MaxSandboxes, "max-sandboxes", 64, "most VMs at a time, warm ones included")
	f.IntVar(&cfg.Warm, "warm", 4, "VMMs kept ready per base that was forked lately; 0 for none")
	vmmFlags(f, &cfg.HostConfig)
	a.storeFlags(f, &cfg.Store)
	readStore := hostStoreFlags(f, &cfg.Store)
	readEgress, readForward := egressFlags(f, &cfg.Egress), forwardFlags(f, &cfg.Forward)
	f.BoolVar(&cfg.NoRebase, "no-rebase", false, "never turn a checkpoint's base and delta into a new base")
	f.StringSliceVar(&cfg.AllowWeak, "allow-weak-host", nil, "start although these `checks` of coppice doctor found weak isolation between guests: "+strings.Join(hostcheck.IsolationNames(), ","))
	readLimits := vmLimitFlags(f, &cfg.HostConfig)
	f.BoolVar(&stop, "stop-vms", false, "end the VMs with SIGTERM or Ctrl-C")
	f.StringVar(&cfg.Metrics, "metrics-listen", "", "loopback `address` of Prometheus metrics, under /metrics; empty for none")
	f.StringVar(&level, "log-level", "info", "debug, info, warn or error")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := a.fromEnvironment(cmd); err != nil {
			return err
		}
		cfg.Leave = !stop
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
		if tokenFile != "" {
			// It may be gone once it is spent: whether it is needed shows later.
			if cfg.JoinToken, err = readSecret(tokenFile); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
		if err := cfg.ChooseVMM(cmd.Context()); err != nil {
			return err
		}
		traces, endTraces, err := tracing.Open(cmd.Context(), a.getenv, "coppice-runner")
		if err != nil {
			return err
		}
		defer func() { _ = endTraces(context.WithoutCancel(cmd.Context())) }() // what was not sent by now is lost
		cfg.Traces = traces
		return daemon.RunRunner(cmd.Context(), cfg, func(r daemon.RunnerReady) error {
			return a.print(r, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "Coppice's runner %s is ready at %s\n  volume   %s\n  VMs      %s\n%s", r.RunnerID, r.Endpoint, r.Volume, cfg.VMMText(), warnings(r.Weak))
				return err
			})
		})
	}
	return c
}

// fromEnvironment sets the flags that the command line did not, from COPPICE_ and their name.
func (a *app) fromEnvironment(c *cobra.Command) error {
	for _, name := range serverFlags {
		flag := c.Flags().Lookup(name)
		value := a.getenv("COPPICE_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_")))
		if flag == nil || flag.Changed || value == "" {
			continue
		}
		values := []string{value}
		if flag.Value.Type() == "stringArray" {
			values = strings.Fields(strings.ReplaceAll(value, ",", " "))
		}
		for _, v := range values {
			if err := c.Flags().Set(name, v); err != nil {
				return usageError{fmt.Errorf("COPPICE_%s: %w", strings.ToUpper(strings.ReplaceAll(name, "-", "_")), err)}
			}
		}
	}
	return nil
}

// serverFlags are those of the servers that have no variable of their own.
var serverFlags = []string{
	"database", "database-file", "database-wait", "allow-weak-database", "listen", "tls-cert", "tls-key", "plain-http", "runner-listen", "key-file", "master-key-file", "api-key-file", "join-key-file", "allow-all-egress", "runner-lease", "runner-fence",
	"vault-addr", "vault-ca-file", "vault-namespace", "vault-prefix", "vault-token-file", "vault-role-id-file", "vault-secret-id-file", "vault-kubernetes-role", "vault-kubernetes-token-file",
	"vault-auth-mount", "secret-env",
	"controller", "join-token-file", "endpoint", "data-listen", "data-url", "data-cert", "data-key", "disk-budget", "max-sandboxes", "warm", "allow-weak-host", "vm-cpu-max", "vm-io-max", "vm-iops-max", "tap-rate", "tap-packets",
	"store-bandwidth", "cache-size", "copies-size", "disk-floor", "fetch", "store-grace", "flow-retention", "attestation-retention", "flow-rows", "flow-rows-project", "flow-rows-denied", "flow-rows-effects", "egress", "egress-allow-private", "egress-resolver", "egress-ca-file", "forward-address", "forward-ports", "no-rebase", "stop-vms", "metrics-listen", "log-level",
}

func readSecret(path string) (string, error) {
	b, err := os.ReadFile(path)
	return strings.TrimSpace(string(b)), err
}
