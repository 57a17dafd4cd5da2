package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/internal/test/kvmlane/wire"
)

var errLimit = errors.New("the time for all of it is over")

// test runs the suites and says what came of each.
func test(ctx context.Context, cfg config, cache string, stdout, log io.Writer) (status int, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, cfg.limit, errLimit)
	defer cancel()
	began := time.Now()
	tmp, err := os.MkdirTemp("", "kvmlane-")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	root, err := makeRoot(ctx, cache, tmp, cfg.fresh, log)
	if err != nil {
		return 1, err
	}
	list := chosen(cfg)
	s := shape{memoryMiB: cfg.memoryMiB, cpus: cfg.cpus, dir: tmp}
	if s.emulator, err = openEmulator(ctx, cfg.qemu, root.emulator); err != nil {
		return 1, err
	}
	if s.payload, err = makePayload(ctx, cfg, tmp, list, log); err != nil {
		return 1, err
	}
	_, _ = fmt.Fprintf(log, "kvmlane: prepared after %.0f s; booting %s from %s on QEMU %s, %s\n",
		time.Since(began).Seconds(), root.release, root.origin, s.emulator.version, s.emulator.accelerator())
	m, err := boot(ctx, s, root)
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, m.end()) }()
	facts, err := m.facts(ctx)
	if err != nil {
		return 1, err
	}
	results := m.runAll(ctx, cfg, stdout)
	_, _ = fmt.Fprintf(stdout, "\nnested KVM lane, %s, %.0f min in all\n%s", root.release+" from "+root.origin, time.Since(began).Minutes(), facts)
	for _, r := range results {
		_, _ = fmt.Fprintln(stdout, r)
	}
	return verdict(results), nil
}

// verdict is the exit status: 0 if something ran and all that ran is well.
func verdict(results []result) int {
	ran := false
	for _, r := range results {
		if r.notGiven != "" {
			continue
		}
		if ran = true; !r.ok() {
			return 1
		}
	}
	if !ran {
		return 1
	}
	return 0
}

// facts are what the results hold for.
func (m *machine) facts(ctx context.Context) (string, error) {
	var out, errOut strings.Builder
	const script = `
test -c /dev/kvm || { echo "there is no /dev/kvm" >&2; exit 1; }
echo "  $(qemu-system-x86_64 --version | head -n 1)"
echo "  control groups: $(cat /sys/fs/cgroup/cgroup.controllers)"
[ ! -e ` + chProgram + ` ] || echo "  $(` + chProgram + ` --version | head -n 1)"`
	status, err := m.client.run(ctx, wire.Run{Command: []string{"sh", "-c", script}}, &out, &errOut)
	if err == nil && status != 0 {
		err = fmt.Errorf("the machine is not what it should be: %s", errOut.String())
	}
	return out.String(), err
}

// runAll runs every suite, one after another.
func (m *machine) runAll(ctx context.Context, cfg config, stdout io.Writer) []result {
	var out []result
	for _, s := range suites {
		if !cfg.run.MatchString(s.name) {
			continue
		}
		if s.cloudHypervisor && cfg.cloudHypervisor == "" {
			out = append(out, result{name: s.name, notGiven: "cloud-hypervisor: not given (COPPICE_CLOUD_HYPERVISOR=/path)"})
			continue
		}
		_, _ = fmt.Fprintf(stdout, "\n# %s: %s\n", s.name, strings.Join(s.command(), " "))
		r := m.runSuite(ctx, s, stdout)
		_, _ = fmt.Fprintf(stdout, "# %s\n", r)
		out = append(out, r)
	}
	return out
}

func (m *machine) runSuite(ctx context.Context, s suite, stdout io.Writer) result {
	ctx, cancel := context.WithTimeoutCause(ctx, s.limit, fmt.Errorf("it took more than %s", s.limit))
	defer cancel()
	r := result{name: s.name}
	began := time.Now()
	status, err := m.client.run(ctx, wire.Run{Command: s.command(), Env: s.environment(), Dir: s.dir()}, &scanner{out: stdout, into: &r}, stdout)
	r.took = time.Since(began)
	r.ended(status, err)
	return r
}
