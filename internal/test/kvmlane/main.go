// Command kvmlane runs tests where KVM really works, whatever this host has: in a machine that QEMU emulates together with AMD's
// virtualisation, whose own guests then run under a KVM like any other, only slowly. `make test-kvm` runs all of it.
//
// For experiments, `kvmlane up` leaves such a machine running; `kvmlane run PROGRAM...` runs something in it, `kvmlane put FILE
// PATH` copies a file there, and `kvmlane down` ends it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"syscall"
	"time"

	"github.com/coppice-dev/coppice/internal/test/kvmlane/wire"
)

// config is what the command line says.
type config struct {
	qemu            string
	memoryMiB       int
	cpus            int
	cloudHypervisor string
	run             *regexp.Regexp
	limit           time.Duration
	fresh           bool
	dir             string // of a machine that stays up
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	status, err := lane(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "kvmlane:", err)
		status = max(status, 1)
	}
	os.Exit(status)
}

const usage = "usage: kvmlane [flags] test | up | run PROGRAM ARGS... | put FILE PATH | down"

func lane(ctx context.Context, args []string, stdout, stderr io.Writer) (int, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return 1, err
	}
	cache = filepath.Join(cache, "coppice-test", "kvmlane")
	var cfg config
	var run string
	f := flag.NewFlagSet("kvmlane", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&cfg.qemu, "qemu", "", "the QEMU that emulates the machine, instead of the newest of Debian's archives")
	f.IntVar(&cfg.memoryMiB, "memory", 8<<10, "MiB of RAM of the machine")
	f.IntVar(&cfg.cpus, "cpus", 1, "processors of the machine; with two it has been seen to die under many VMs at once")
	f.StringVar(&cfg.cloudHypervisor, "cloud-hypervisor", "", "a cloud-hypervisor to test as well")
	f.StringVar(&run, "run", "", "only the suites whose name matches this expression")
	f.DurationVar(&cfg.limit, "limit", 45*time.Minute, "what all of it may take")
	f.BoolVar(&cfg.fresh, "fresh", false, "install the machine's packages again")
	f.StringVar(&cfg.dir, "dir", filepath.Join(cache, "up"), "directory of a machine that stays up")
	if err := f.Parse(args); err != nil {
		return 2, nil //nolint:nilerr // the flag set has said it
	}
	if cfg.run, err = regexp.Compile(run); err != nil {
		return 2, fmt.Errorf("-run: %w", err)
	}
	rest := f.Args()
	s := shape{memoryMiB: cfg.memoryMiB, cpus: cfg.cpus, dir: cfg.dir}
	switch {
	case len(rest) == 1 && rest[0] == "test":
		return test(ctx, cfg, cache, stdout, stderr)
	case len(rest) == 1 && rest[0] == "up":
		return 0, up(ctx, cfg, s, cache, stderr)
	case len(rest) > 1 && rest[0] == "run":
		return inside(ctx, s, func(c *client) (int, error) {
			return c.run(ctx, wire.Run{Command: rest[1:], Env: laneEnv}, stdout, stderr)
		})
	case len(rest) == 3 && rest[0] == "put":
		return inside(ctx, s, func(c *client) (int, error) { return 0, c.put(ctx, rest[1], rest[2]) })
	case len(rest) == 1 && rest[0] == "down":
		return 0, down(s)
	}
	return 2, errors.New(usage)
}

func inside(ctx context.Context, s shape, f func(*client) (int, error)) (status int, err error) {
	c, err := dial(ctx, s.socket())
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	return f(c)
}

// bootLimit bounds the boot of the machine; it takes ten seconds.
const bootLimit = 3 * time.Minute

// up boots a machine with the same payload as the tests have, and leaves it running.
func up(ctx context.Context, cfg config, s shape, cache string, log io.Writer) error {
	if pid, ok := pidOf(s); ok {
		return fmt.Errorf("a machine in %s runs already, as process %d", s.dir, pid)
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	root, err := makeRoot(ctx, cache, s.dir, cfg.fresh, log)
	if err != nil {
		return err
	}
	if s.emulator, err = openEmulator(ctx, cfg.qemu, root.emulator); err != nil {
		return err
	}
	if s.payload, err = makePayload(ctx, cfg, s.dir, chosen(cfg), log); err != nil {
		return err
	}
	if _, err := start(s, root, false); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, bootLimit)
	defer cancel()
	c, err := connect(ctx, s)
	if err != nil {
		return errors.Join(err, down(s))
	}
	return c.Close()
}

// chosen are the suites that can be run.
func chosen(cfg config) []suite {
	var out []suite
	for _, s := range suites {
		if cfg.run.MatchString(s.name) && (!s.cloudHypervisor || cfg.cloudHypervisor != "") {
			out = append(out, s)
		}
	}
	return out
}
