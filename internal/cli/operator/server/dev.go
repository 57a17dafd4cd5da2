package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/connections"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/operator/host"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/devstack"
	"github.com/coppice-dev/coppice/internal/tracing"
)

// NewDevCommand makes the command "coppice dev".
func NewDevCommand(a *cli.App) *cobra.Command {
	cfg := devstack.Config{PGBin: a.Getenv("PGBIN"), HostConfig: host.Config(a)}
	var budget, level, format, onExit string
	c := &cobra.Command{
		Use:   "dev",
		Short: "Run controller, runner and a private PostgreSQL on this machine",
		Long: `Run everything on this machine, in one command: a private PostgreSQL, the controller with its REST API on a loopback address, and
a runner. It needs root, for network namespaces and for a user id per VM, but no KVM.

VMs run on cloud-hypervisor if it is installed ('make setup-kvm', or its path in COPPICE_CLOUD_HYPERVISOR) and really boots a guest under KVM.
Otherwise they run on QEMU (COPPICE_QEMU), with KVM if a guest boots under it. The command prints its choice and the reason.

The API has no TLS, so it listens on loopback only, unless --plain-http says that a proxy in front of it speaks TLS.

Clients of Arrakis and of Arbor need no key, so every user of this machine can use VMs through them. --arrakis-require-key, --arbor-require-key,
--arrakis-listen - and --arbor-listen - change that.

The command enters the address and the key of the API as a context in ~/.config/coppice/connection.json, where the client commands of this
user find them ('coppice context'), and takes the entry away when it ends.

Ctrl-C suspends the running workspaces: the next start can resume them ('coppice ws resume'). Closing the terminal does the same. A second
Ctrl-C stops those that are left at once; they are lost then, with their checkpoints kept. --on-exit terminate ends the workspaces instead,
--on-exit stop only stops their VMs. Checkpoints, images and the database stay in the data directory for the next start.`,
		Args: cobra.NoArgs,
	}
	f := c.Flags()
	f.StringVar(&cfg.DataDir, "data-dir", cmp.Or(a.Getenv("COPPICE_DATA_DIR"), host.DefaultDataDir), "`directory` for all data")
	f.StringVar(&cfg.ImagesDir, "images-dir", a.Getenv("COPPICE_IMAGES_DIR"), "image store `directory` (default: images in the data directory)")
	f.StringVar(&cfg.Listen, "listen", "127.0.0.1:7070", "`address` of the API; port 0 picks a free one")
	f.BoolVar(&cfg.PlainHTTP, "plain-http", false, "serve the API without TLS on other addresses than loopback: only behind a proxy that speaks TLS")
	e2bFlags(f, &cfg.E2B, " (default 127.0.0.1:7075, or a free port if --listen does not have port 7070); - for none")
	arrakisFlags(f, &cfg.Arrakis, " (default 127.0.0.1:7000, or a free port if --listen does not have port 7070); - for none", "5901=gui,5736=code")
	devFlags(f, &cfg)
	f.BoolVar(&cfg.ArrakisNeedsKey, "arrakis-require-key", false, "requests of Arrakis' clients need a key, as the password of the client's URL; without this flag they need none, and --arrakis-listen must be on loopback")
	previewFlags(f, &cfg.Preview, " (default 127.0.0.1:7076, or a free port if --listen does not have port 7070); - for none", "localhost")
	f.StringVar(&onExit, "on-exit", string(devstack.Suspend), "what to `do` with running workspaces at Ctrl-C: suspend, terminate, or stop")
	f.StringVar(&budget, "disk-budget", "32G", "size of the volume for checkpoints, if the program makes one, as `size` with K, M, G or T")
	f.IntVar(&cfg.MaxSandboxes, "max-sandboxes", 64, "maximum number of VMs, including warm ones")
	f.IntVar(&cfg.Warm, "warm", 4, "number of VMMs kept ready per recently forked base; 0 for none")
	f.IntVar(&cfg.PrepareMax, "prepare-max", 0, "number of machines prepared at most for forks that are expected soon; 0 for none")
	vmmFlags(f, &cfg.HostConfig)
	storeFlags(a, f, &cfg.Store)
	secretFlags(a, f, &cfg.Secrets, true)
	readStore := hostStoreFlags(f, &cfg.Store)
	readEgress, readForward := egressFlags(f, &cfg.Egress), forwardFlags(f, &cfg.Forward)
	readLimits := vmLimitFlags(f, &cfg.HostConfig)
	cfg.WarnWeak = true
	f.BoolVar(&cfg.NoRebase, "no-rebase", false, "never turn a checkpoint's base and delta into a new base")
	f.StringVar(&cfg.Metrics, "metrics-listen", "", "loopback `address` of Prometheus metrics, under /metrics; empty for none")
	logFlags(f, &level, &format)
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		daemon.RelaxGC()
		listenBeside(&cfg)
		if err := cfg.Check(); err != nil {
			return err
		}
		var err error
		if cfg.OnExit, err = devstack.ParseOnExit(onExit); err != nil {
			return exit.Misuse(fmt.Errorf("--on-exit: %w", err))
		}
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
		if err := cfg.ChooseVMM(cmd.Context()); err != nil {
			return err
		}
		traces, endTraces, err := tracing.Open(cmd.Context(), a.Getenv, "coppice-dev")
		if err != nil {
			return err
		}
		defer func() { _ = endTraces(context.WithoutCancel(cmd.Context())) }() // what was not sent by now is lost
		cfg.Traces = traces
		cfg.Hurry = secondSignal(cmd.Context())
		cfg.Tell = func(text string) { fmt.Fprintf(a.Stderr, "coppice: %s\n", text) }
		leave := func() error { return nil }
		err = devstack.Run(cmd.Context(), cfg, func(r devstack.Ready) error {
			var name string
			var current bool
			var err error
			if name, current, leave, err = a.EnterContext(connections.Entry{Server: r.Server, Token: r.Key, DataDir: r.DataDir}); err != nil {
				return err
			}
			return a.Print(r, func(w io.Writer) error { return greet(w, cfg, r, name, current) })
		})
		return errors.Join(err, leave())
	}
	return c
}

// listenBeside sets the addresses of what is served beside the API.
func listenBeside(cfg *devstack.Config) {
	cfg.E2B.Listen = beside(cfg.E2B.Listen, cfg.Listen, "127.0.0.1:7075")
	cfg.Arrakis.Listen = beside(cfg.Arrakis.Listen, cfg.Listen, "127.0.0.1:7000")
	cfg.Arbor.Listen = beside(cfg.Arbor.Listen, cfg.Listen, "127.0.0.1:7077")
	if cfg.Preview.Listen = beside(cfg.Preview.Listen, cfg.Listen, "127.0.0.1:7076"); cfg.Preview.Listen == "" {
		cfg.Preview.Domain = ""
	}
}

// beside is where something is served beside the API: at an address that was given, or else at its usual one if the API is at its own.
func beside(address, api, usual string) string {
	switch {
	case address == "-":
		return ""
	case address != "":
		return address
	case strings.HasSuffix(api, ":7070"):
		return usual
	}
	return "127.0.0.1:0"
}

// e2bText says how E2B's clients are used.
func e2bText(cfg devstack.Config, r devstack.Ready) string {
	if r.E2B == "" {
		return ""
	}
	return fmt.Sprintf("  E2B      E2B_API_URL and E2B_SANDBOX_URL %s, E2B_API_KEY as in %s; egress %s\n", r.E2B, filepath.Join(r.DataDir, "api-key"), cfg.E2B.Egress())
}

// arrakisText says how Arrakis' clients are used.
func arrakisText(r devstack.Ready) string {
	if r.Arrakis == "" {
		return ""
	}
	return fmt.Sprintf("  Arrakis  SandboxManager(%q); %s\n", r.Arrakis, r.ArrakisTerms)
}

// arborText says how Arbor's clients are used.
func arborText(r devstack.Ready) string {
	if r.Arbor == "" {
		return ""
	}
	return fmt.Sprintf("  Arbor    BASE=%s; %s\n", r.Arbor, r.ArborTerms)
}

// previewText says where previews are.
func previewText(r devstack.Ready) string {
	if r.Preview == "" {
		return ""
	}
	return "  previews " + r.Preview + "\n"
}

// secondSignal is closed by the first signal after the one that ended ctx.
func secondSignal(ctx context.Context) <-chan struct{} {
	hurry := make(chan struct{})
	again := make(chan os.Signal, 1)
	context.AfterFunc(ctx, func() {
		signal.Notify(again, os.Interrupt, syscall.SIGTERM) // for the rest of the process
		<-again
		close(hurry)
	})
	return hurry
}

// atExit says what Ctrl-C does.
func atExit(o devstack.OnExit) string {
	switch o {
	case devstack.Suspend:
		return "Ctrl-C suspends the running workspaces; resume them after the next start with coppice ws resume."
	case devstack.Terminate:
		return "Ctrl-C terminates the running workspaces; checkpoints stay."
	case devstack.Stop:
	}
	return "Ctrl-C stops the VMs; checkpoints stay."
}

func greet(w io.Writer, cfg devstack.Config, r devstack.Ready, name string, current bool) error {
	how := "context  " + name
	if !current {
		how += "; another server is the current one: coppice context use " + name + ", or --context " + name
	}
	_, err := fmt.Fprintf(w, `Coppice is ready at %s
  data     %s
  volume   %s
  VMs      %s
  %s
%s%s
Try this in another terminal, as the same user:
  coppice image build              once
  coppice ws create --name demo
  coppice ws exec demo -- uname -a
  coppice fork demo -n 4
%s
`, r.Server, r.DataDir, r.Volume, cfg.VMMText(), how, e2bText(cfg, r)+arrakisText(r)+arborText(r)+previewText(r), warnings(r.Weak), atExit(cfg.OnExit))
	return err
}
