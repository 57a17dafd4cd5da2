package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/operator/host"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/hostcheck"
	"github.com/coppice-dev/coppice/internal/tracing"
)

// NewRunnerCommand makes the command "coppice runner".
func NewRunnerCommand(a *cli.App) *cobra.Command {
	cfg := daemon.RunnerConfig{HostConfig: host.Config(a)}
	var tokenFile, budget, level, format string
	var stop bool
	c := &cobra.Command{
		Use:   "runner",
		Short: "Run a runner: the virtual machines of this host, for a controller",
		Long: `Run a runner: the virtual machines of this host, for a controller. It needs root, for network namespaces and for a user id per VM, but no KVM.

The first start uses up a token of 'coppice runner-token create' and keeps a certificate in the data directory. Later starts need no token. The
certificate is valid for a day, and the runner renews it in time. A runner that was off for longer needs another token, created with --runner.

VMs run on cloud-hypervisor if it is installed ('make setup-kvm', or its path in COPPICE_CLOUD_HYPERVISOR) and really boots a guest under KVM.
Otherwise they run on QEMU (COPPICE_QEMU), with KVM if a guest boots under it. The runner prints and logs its choice and the reason.

The runner does not start on a host with weak isolation between guests (swap, merged pages, unmitigated CPU vulnerabilities, missing cgroup
controllers), unless --allow-weak-host names each weakness. 'coppice doctor' lists them and says how to fix them.

The VMs outlive this process, however it ends. The next runner on the same data directory takes them over, with their sessions. A VM keeps the
VMM that it was started with, whatever the next runner uses. The runner ends the VMs in two cases: the controllers were silent for longer than
the lease allows, or the process is told to stop and has --stop-vms.

With --data-listen, users' terminals and files go straight to this runner, with a pass of the API, and do not load the controllers.
Every flag can come from the environment: --join-token-file from COPPICE_JOIN_TOKEN_FILE, and so on.`,
		Example: `  coppice runner-token create > /etc/coppice/join-token
  coppice runner --controller https://ctl-1:7071 --controller https://ctl-2:7071 --join-token-file /etc/coppice/join-token --listen 0.0.0.0:7072`,
		Args: cobra.NoArgs,
	}
	f := c.Flags()
	f.StringArrayVar(&cfg.Controllers, "controller", nil, "`URL` of a controller's listener for runners, https://host:port; may be repeated; the runner tries the next one if one is unreachable")
	f.StringVar(&tokenFile, "join-token-file", "", "`file` with a join token; not read again once the runner has joined")
	f.StringVar(&cfg.Listen, "listen", "127.0.0.1:7072", "`address` for controllers, always with mutual TLS")
	f.StringVar(&cfg.Endpoint, "endpoint", "", "`URL` under which controllers reach --listen, https://host:port (default: its address, or this host's name if that is 0.0.0.0)")
	f.StringVar(&cfg.DataListen, "data-listen", "", "`address` of the data plane for users' streams and files (default: none; they go through the controllers)")
	f.StringVar(&cfg.DataURL, "data-url", "", "`URL` under which users reach --data-listen, https://host:port (default: as for --endpoint)")
	f.StringVar(&cfg.DataCert, "data-cert", "", "certificate `file` for --data-listen, in PEM (default: the runner's own; the API tells users its authority)")
	f.StringVar(&cfg.DataKey, "data-key", "", "`file` with the key of that certificate, in PEM")
	f.StringVar(&cfg.DataDir, "data-dir", cmp.Or(a.Getenv("COPPICE_DATA_DIR"), host.DefaultDataDir), "`directory` for all data")
	f.StringVar(&cfg.ImagesDir, "images-dir", a.Getenv("COPPICE_IMAGES_DIR"), "image store `directory` (default: images in the data directory)")
	f.StringVar(&budget, "disk-budget", "32G", "size of the volume for checkpoints, if the program makes one, as `size` with K, M, G or T")
	f.IntVar(&cfg.MaxSandboxes, "max-sandboxes", 64, "maximum number of VMs, including warm ones")
	f.IntVar(&cfg.Warm, "warm", 4, "number of VMMs kept ready per recently forked base; 0 for none")
	f.IntVar(&cfg.PrepareMax, "prepare-max", 0, "number of machines prepared at most for forks that are expected soon; 0 for none")
	vmmFlags(f, &cfg.HostConfig)
	storeFlags(a, f, &cfg.Store)
	readStore := hostStoreFlags(f, &cfg.Store)
	readEgress, readForward := egressFlags(f, &cfg.Egress), forwardFlags(f, &cfg.Forward)
	f.BoolVar(&cfg.NoRebase, "no-rebase", false, "never turn a checkpoint's base and delta into a new base")
	f.StringSliceVar(&cfg.AllowWeak, "allow-weak-host", nil, "start although these `checks` of coppice doctor found weak isolation between guests: "+strings.Join(hostcheck.IsolationNames(), ","))
	readLimits := vmLimitFlags(f, &cfg.HostConfig)
	f.BoolVar(&stop, "stop-vms", false, "end the VMs at SIGTERM or Ctrl-C")
	f.StringVar(&cfg.Metrics, "metrics-listen", "", "loopback `address` of Prometheus metrics, under /metrics; empty for none")
	logFlags(f, &level, &format)
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := fromEnvironment(a, cmd); err != nil {
			return err
		}
		cfg.Leave = !stop
		var err error
		if cfg.DiskBudget, err = argument.Size(budget); err != nil {
			return exit.Misuse(fmt.Errorf("--disk-budget: %w", err))
		}
		if err := errors.Join(readStore(), readEgress(), readForward(), readLimits()); err != nil {
			return err
		}
		if cfg.DataDir, err = filepath.Abs(cfg.DataDir); err != nil {
			return err
		}
		if cfg.Log, err = newLogger(a.Stderr, level, format); err != nil {
			return exit.Misuse(err)
		}
		if tokenFile != "" {
			// The file may be gone after the token was spent. Whether the token is needed is known later.
			if cfg.JoinToken, err = argument.Secret(tokenFile); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
		if err := cfg.ChooseVMM(cmd.Context()); err != nil {
			return err
		}
		traces, endTraces, err := tracing.Open(cmd.Context(), a.Getenv, "coppice-runner")
		if err != nil {
			return err
		}
		defer func() { _ = endTraces(context.WithoutCancel(cmd.Context())) }() // what was not sent by now is lost
		cfg.Traces = traces
		return daemon.RunRunner(cmd.Context(), cfg, func(r daemon.RunnerReady) error {
			return a.Print(r, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "Coppice's runner %s is ready at %s\n  volume   %s\n  VMs      %s\n%s", r.RunnerID, r.Endpoint, r.Volume, cfg.VMMText(), warnings(r.Weak))
				return err
			})
		})
	}
	return c
}
