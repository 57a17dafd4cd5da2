package hostcheck

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Isolation looks at what keeps guests apart from each other and from the host. controllers are the cgroup v2 controllers that can
// bound a VM here.
func Isolation(ctx context.Context, controllers []string) ([]Result, error) {
	report, err := Run(ctx, files{proc: "/proc", sys: "/sys", dev: "/dev"}.isolation(controllers))
	return report.Checks, err
}

func (f files) isolation(controllers []string) []Check {
	return []Check{cgroups(controllers), f.swap, f.samePageMerging, f.cpu, f.smt}
}

// needed are the controllers without which a VM can take more of the host than its share.
var needed = []string{"cpu", "io", "memory", "pids"}

// controllers are those that the host's unified hierarchy offers.
func (f files) controllers() []string {
	for _, dir := range []string{"fs/cgroup", "fs/cgroup/unified"} {
		if raw, err := os.ReadFile(filepath.Join(f.sys, dir, "cgroup.controllers")); err == nil {
			return strings.Fields(string(raw))
		}
	}
	return nil
}

func cgroups(have []string) Check {
	const cure = "boot with systemd.unified_cgroup_hierarchy=1; in a container, delegate the controllers to it"
	return func(context.Context) Result {
		var missing []string
		for _, c := range needed {
			if !slices.Contains(have, c) {
				missing = append(missing, c)
			}
		}
		if len(missing) > 0 {
			return warn(checkCgroups, cure, "controllers missing: %s; the host does not bound what a VM takes of them", strings.Join(missing, " "))
		}
		return ok(checkCgroups, "controllers %s", strings.Join(have, " "))
	}
}

func (f files) swap(context.Context) Result {
	const cure = "swapoff -a, and no swap in /etc/fstab; whether swap is encrypted is not looked at"
	raw, err := os.ReadFile(filepath.Join(f.proc, "swaps"))
	if err != nil {
		return warn(checkSwap, cure, "the kernel does not say whether there is swap: %s", cause(err))
	}
	if lines := strings.Split(strings.TrimSpace(string(raw)), "\n"); len(lines) > 1 {
		return warn(checkSwap, cure, "%d swap areas: guests' memory may reach a disk unencrypted, and a pause waits for what was swapped out", len(lines)-1)
	}
	return ok(checkSwap, "none")
}

func (f files) samePageMerging(context.Context) Result {
	const cure = "echo 2 > /sys/kernel/mm/ksm/run"
	raw, err := os.ReadFile(filepath.Join(f.sys, "kernel", "mm", "ksm", "run"))
	switch {
	case os.IsNotExist(err):
		return ok(checkKSM, "the kernel has none")
	case err != nil:
		return warn(checkKSM, cure, "the kernel does not say whether it merges equal pages: %s", cause(err))
	case strings.TrimSpace(string(raw)) == "1":
		return warn(checkKSM, cure, "the kernel merges equal pages, so that one guest can tell by timing what another has in memory")
	}
	return ok(checkKSM, "off")
}

// vulnerabilities returns the kernel's text on each known fault of the processor, by name.
func (f files) vulnerabilities() (map[string]string, error) {
	dir := filepath.Join(f.sys, "devices", "system", "cpu", "vulnerabilities")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	said := make(map[string]string, len(entries))
	for _, e := range entries {
		raw, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		said[e.Name()] = strings.TrimSpace(string(raw))
	}
	return said, nil
}

func (f files) cpu(context.Context) Result {
	const cure = "install the processor's microcode and a newer kernel, and boot without mitigations=off"
	said, err := f.vulnerabilities()
	if err != nil {
		return warn(checkCPU, cure, "the kernel does not say which faults of the processor it mitigates: %s", cause(err))
	}
	var open []string
	for name, text := range said {
		// A fault of the processor alone begins with the word; "KVM: Vulnerable" is one of what runs guests.
		if strings.HasPrefix(text, "Vulnerable") || strings.Contains(text, "KVM: Vulnerable") {
			open = append(open, name)
		}
	}
	slices.Sort(open)
	if len(open) > 0 {
		return warn(checkCPU, cure, "the kernel says that it does not mitigate %s: a guest may read memory of the host or of another guest", strings.Join(open, ", "))
	}
	return ok(checkCPU, "the kernel mitigates every fault of the processor that it knows")
}

func (f files) smt(context.Context) Result {
	const cure = "echo off > /sys/devices/system/cpu/smt/control, or boot with nosmt"
	raw, err := os.ReadFile(filepath.Join(f.sys, "devices", "system", "cpu", "smt", "active"))
	switch {
	case os.IsNotExist(err):
		return ok(checkSMT, "the kernel has none")
	case err != nil:
		return warn(checkSMT, cure, "the kernel does not say whether a core runs two threads: %s", cause(err))
	case strings.TrimSpace(string(raw)) != "1":
		return ok(checkSMT, "off")
	}
	said, err := f.vulnerabilities()
	if err != nil {
		return warn(checkSMT, cure, "a core runs two threads, and the kernel does not say whether they are safe from each other: %s", cause(err))
	}
	for name, text := range said {
		if strings.Contains(text, "SMT vulnerable") {
			return warn(checkSMT, cure, "a core runs two threads, and the kernel says that one can spy on the other (%s): a guest may read what another computes", name)
		}
	}
	return ok(checkSMT, "on; the kernel knows no fault by which two threads of a core read each other's data")
}
