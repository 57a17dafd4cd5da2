package server

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/runner/netns"
)

// vmLimitFlags bound a VM's use of its host. The returned function parses the flags that are sizes.
func vmLimitFlags(f *pflag.FlagSet, cfg *daemon.HostConfig) func() error {
	f.IntVar(&cfg.Limits.CPUPercent, "vm-cpu-max", 0, "maximum processor time for each vCPU of a VM, in `percent` of a processor of this host; 0: no limit, VMs share by weight")
	f.IntVar(&cfg.Limits.IOPS, "vm-iops-max", 0, "maximum disk `operations` per second of a VM, for reads and for writes; 0: no limit")
	f.IntVar(&cfg.TapRate.Packets, "tap-packets", netns.DefaultRate.Packets, "maximum `packets` per second that a guest may send")
	io := f.String("vm-io-max", "", "maximum disk bytes per second of a VM, for reads and for writes, as `size` with K, M, G or T; empty: no limit")
	tap := f.String("tap-rate", "128M", "maximum bytes per second that a guest may send, as `size` with K, M, G or T")
	return func() error {
		var errs []error
		if *io != "" {
			n, err := argument.Size(*io)
			cfg.Limits.IOBytes = n
			errs = append(errs, wrapFlag("--vm-io-max", err))
		}
		n, err := argument.Size(*tap)
		cfg.TapRate.Bytes = n
		errs = append(errs, wrapFlag("--tap-rate", err))
		if cfg.Limits.CPUPercent < 0 || cfg.Limits.IOPS < 0 || cfg.TapRate.Packets <= 0 {
			errs = append(errs, exit.Misuse(errors.New("--vm-cpu-max and --vm-iops-max must not be negative, and --tap-packets must be positive")))
		}
		return errors.Join(errs...)
	}
}

func wrapFlag(name string, err error) error {
	if err == nil {
		return nil
	}
	return exit.Misuse(fmt.Errorf("%s: %w", name, err))
}

// warnings has a line for each weakness of the host.
func warnings(weak []string) string {
	var b strings.Builder
	for _, w := range weak {
		b.WriteString("  warning  " + w + "\n")
	}
	return b.String()
}
