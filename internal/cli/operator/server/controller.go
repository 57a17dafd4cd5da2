package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/controller/postgres/durability"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/tracing"
)

// NewControllerCommand makes the command "coppice controller".
func NewControllerCommand(a *cli.App) *cobra.Command {
	cfg := daemon.ControllerConfig{}
	var databaseFile, level, format string
	c := &cobra.Command{
		Use:   "controller",
		Short: "Run a controller: the REST API over a PostgreSQL database, for runners on other hosts",
		Long: `Run a controller: the REST API over a PostgreSQL database, for runners on other hosts. Several controllers may run over one database.

The first controller of a database creates the key file, which encrypts the cluster's keys in the database. The other controllers need a copy
of it. An attacker with both the file and the database can act as a runner: keep them apart, and back both up.

It does not start on a database server that can lose acknowledged work when it or its host crashes (fsync, full_page_writes or synchronous_commit
is off), unless --allow-weak-database names each setting. It starts on a server without a synchronous standby, and says what a failover can lose.

Runners connect to --runner-listen with a certificate of the cluster. They get it for a token of 'coppice runner-token create'.
Every flag can come from the environment: --runner-listen from COPPICE_RUNNER_LISTEN, and so on. SIGTERM and SIGHUP end the controller in order:
it takes no more requests, then ends its operations or leaves them to the next controller.`,
		Example: `  coppice controller --database postgres://coppice@db/coppice --key-file /etc/coppice/cluster.key --api-key-file /etc/coppice/api.key \
    --listen 0.0.0.0:7070 --tls-cert api.pem --tls-key api.key --runner-listen 0.0.0.0:7071`,
		Args: cobra.NoArgs,
	}
	f := c.Flags()
	f.StringVar(&cfg.Database, "database", "", "PostgreSQL `address`, as a URL or key=value pairs; a password is better in --database-file or PGPASSFILE")
	f.StringVar(&databaseFile, "database-file", "", "`file` with the address, instead of --database")
	f.DurationVar(&cfg.DatabaseWait, "database-wait", time.Minute, "how long to wait for the database at the start")
	f.StringSliceVar(&cfg.AllowWeak, "allow-weak-database", nil, "start although these `settings` of the database server are off, so that its crash can lose acknowledged work: "+strings.Join(durability.Settings(), ","))
	f.StringVar(&cfg.Listen, "listen", "127.0.0.1:7070", "`address` of the API; port 0 picks a free one")
	f.StringVar(&cfg.TLSCert, "tls-cert", "", "certificate `file` of the API, in PEM; read again when it changes")
	f.StringVar(&cfg.TLSKey, "tls-key", "", "`file` with the key of that certificate, in PEM")
	f.BoolVar(&cfg.PlainHTTP, "plain-http", false, "serve the API without TLS on other addresses than loopback: only behind a proxy that speaks TLS")
	e2bFlags(f, &cfg.E2B, ", as --listen is served (default: not served)")
	arrakisFlags(f, &cfg.Arrakis, ", as --listen is served (default: not served); each request needs a key, as the password of the client's URL", "")
	f.StringVar(&cfg.Arbor.Listen, "arbor-listen", "", "serve Arbor's clients on this `address`, as --listen is served (default: not served); each request needs a key")
	f.StringVar(&cfg.Arrakis.KeyFile, "arrakis-key-file", "", "`file` with an API key that requests of Arrakis' clients use if they have none; only with --arrakis-listen on loopback")
	previewFlags(f, &cfg.Preview, " (default: not served)", "")
	previewTLSFlags(f, &cfg.Preview)
	f.StringVar(&cfg.RunnerListen, "runner-listen", "127.0.0.1:7071", "`address` for runners, always with mutual TLS")
	f.StringVar(&cfg.KeyFile, "key-file", "", "`file` with the key that encrypts the cluster's keys in the database; the first controller creates it")
	f.StringVar(&cfg.MasterKeys, "master-key-file", "", "`file` with the master keys that wrap the keys of projects with encryption, one per line in hex, the present one first")
	storeFlags(a, f, &cfg.Store)
	secretFlags(a, f, &cfg.Secrets, false)
	f.DurationVar(&cfg.Tune.StoreGrace, "store-grace", time.Hour, "grace period before unreferenced objects in the store are deleted; must be at least runner lease plus fence")
	f.StringVar(&cfg.APIKeyFile, "api-key-file", "", "`file` with the first administrator's API key; created if it does not exist")
	f.DurationVar(&cfg.Tune.AttestationsKept, "attestation-retention", controller.AttestationsKept, "how long to keep attestations of reseals, by whole months; the same on all controllers")
	f.StringVar(&cfg.JoinKeyFile, "join-key-file", "", "`file` with an API key that only makes join tokens (scope runner:join), for scripts that start runners; created if it does not exist")
	registryFlag(f, &cfg.ImageRegistries)
	f.BoolVar(&cfg.Tune.AllowAllEgress, "allow-all-egress", false, "allow the egress policy allow-all: sandboxes then reach everything that this network reaches; 'coppice project quota --allow-all-egress' overrides it for a project")
	f.DurationVar(&cfg.Tune.FlowsKept, "flow-retention", flows.DefaultKept, "how long to keep the records of egress flows, by whole months; the same on all controllers")
	q := &cfg.Tune.FlowQuota
	f.Int64Var(&q.Reads.Workspace, "flow-rows", flows.FlowsOfWorkspace, "maximum `rows` of read-only requests per workspace; further ones are counted by minute and host")
	f.Int64Var(&q.Reads.Project, "flow-rows-project", flows.FlowsOfProject, "maximum `rows` of read-only requests of all workspaces of a project")
	f.Int64Var(&q.Denied.Workspace, "flow-rows-denied", flows.DeniedOfWorkspace, "maximum `rows` of denied flows per workspace; a project has five times as many")
	f.Int64Var(&q.Effects.Workspace, "flow-rows-effects", flows.EffectsOfWorkspace, "maximum `rows` per workspace of flows that may have changed something; a project has ten times as many")
	f.DurationVar(&cfg.Tune.RunnerLease, "runner-lease", 15*time.Second, "how long a silent runner still gets work (soft lease); the same on all controllers")
	f.DurationVar(&cfg.Tune.RunnerFence, "runner-fence", 10*time.Minute, "how long after the soft lease a silent runner's workspaces are lost; by then the runner has ended their VMs")
	f.StringVar(&cfg.Metrics, "metrics-listen", "", "loopback `address` of Prometheus metrics, under /metrics; empty for none")
	logFlags(f, &level, &format)
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := fromEnvironment(a, cmd); err != nil {
			return err
		}
		var err error
		if cfg.Database, err = databaseAddress(cfg.Database, databaseFile); err != nil {
			return err
		}
		if cfg.Log, err = newLogger(a.Stderr, level, format); err != nil {
			return exit.Misuse(err)
		}
		traces, endTraces, err := tracing.Open(cmd.Context(), a.Getenv, "coppice-controller")
		if err != nil {
			return err
		}
		defer func() { _ = endTraces(context.WithoutCancel(cmd.Context())) }() // what was not sent by now is lost
		cfg.Tune.Traces = traces
		daemon.RelaxGC()
		return daemon.RunController(cmd.Context(), cfg, func(r daemon.ControllerReady) error {
			return a.Print(r, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "Coppice's controller is ready at %s\n  for runners   %s\n  cluster       %s\n  database      %s\n", r.Server, r.Runners, r.ClusterID, r.Database.Promise)
				if err == nil && r.E2B != "" {
					_, err = fmt.Fprintf(w, "  E2B clients   %s (egress %s)\n", r.E2B, cfg.E2B.Egress())
				}
				if err == nil && r.Arrakis != "" {
					_, err = fmt.Fprintf(w, "  Arrakis       %s (%s)\n", r.Arrakis, r.ArrakisTerms)
				}
				if err == nil && r.Arbor != "" {
					_, err = fmt.Fprintf(w, "  Arbor         %s (each request needs an API key)\n", r.Arbor)
				}
				return err
			})
		})
	}
	return c
}

// databaseAddress returns the address from the flag or from the file, whichever was given.
func databaseAddress(address, file string) (string, error) {
	if file == "" {
		return address, nil
	}
	if address != "" {
		return "", exit.Misuse(errors.New("--database and --database-file exclude each other"))
	}
	return argument.Secret(file)
}

// fromEnvironment sets the flags that the command line did not set, from variables named COPPICE_ and the name of the flag.
func fromEnvironment(a *cli.App, c *cobra.Command) error {
	for _, name := range serverFlags {
		flag := c.Flags().Lookup(name)
		value := a.Getenv("COPPICE_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_")))
		if flag == nil || flag.Changed || value == "" {
			continue
		}
		values := []string{value}
		if flag.Value.Type() == "stringArray" {
			values = strings.Fields(strings.ReplaceAll(value, ",", " "))
		}
		for _, v := range values {
			if err := c.Flags().Set(name, v); err != nil {
				return exit.Misuse(fmt.Errorf("COPPICE_%s: %w", strings.ToUpper(strings.ReplaceAll(name, "-", "_")), err))
			}
		}
	}
	return nil
}

// serverFlags are those of the servers that have no variable of their own.
var serverFlags = []string{
	"database", "database-file", "database-wait", "allow-weak-database", "listen", "tls-cert", "tls-key", "plain-http", "e2b-listen", "e2b-domain", "e2b-user", "e2b-open-egress", "arrakis-listen", "arrakis-key-file", "arrakis-image", "arrakis-ports", "arrakis-open-egress", "arbor-listen", "preview-listen", "preview-domain", "preview-tls-cert", "preview-tls-key", "preview-acme-host", "preview-acme-cache", "preview-acme-directory", "runner-listen", "key-file", "master-key-file", "api-key-file", "join-key-file", "allow-all-egress", "image-registry", "runner-lease", "runner-fence",
	"vault-addr", "vault-ca-file", "vault-namespace", "vault-prefix", "vault-token-file", "vault-role-id-file", "vault-secret-id-file", "vault-kubernetes-role", "vault-kubernetes-token-file",
	"vault-auth-mount", "secret-env",
	"controller", "join-token-file", "endpoint", "data-listen", "data-url", "data-cert", "data-key", "disk-budget", "max-sandboxes", "warm", "prepare-max", "allow-weak-host", "vm-cpu-max", "vm-io-max", "vm-iops-max", "tap-rate", "tap-packets",
	"store-bandwidth", "cache-size", "copies-size", "disk-floor", "fetch", "store-grace", "flow-retention", "attestation-retention", "flow-rows", "flow-rows-project", "flow-rows-denied", "flow-rows-effects", "egress", "egress-allow-private", "egress-resolver", "egress-ca-file", "forward-address", "forward-ports", "forward-bind", "no-rebase", "stop-vms", "metrics-listen", "log-level", "log-format",
}
