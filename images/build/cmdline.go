package build

import "strings"

// rootFSType is the file system of RootFS, as mount(2) names it.
const rootFSType = "erofs"

// commandLine returns the kernel command line of a guest. It is part of the image, and so is the clock source: the
// command line of a checkpoint's kernel holds for all its forks. docs/IMAGES.md has the measurements.
func commandLine(arch string) string {
	words := []string{
		"console=ttyS0", "quiet", "loglevel=3",
		"coppice.rootfstype=" + rootFSType,
		// A dead guest ends its VMM at once instead of hanging.
		"panic=-1", "reboot=t",
		// 0.3 s of self-tests of ciphers that no guest uses before it loads them.
		"cryptomgr.notests",

		// The other options keep an idle guest from writing its memory, because every checkpoint has to carry written
		// memory. Together they take its timer interrupts from 13 to 5 a second and the host's load per guest from 0.7
		// % to 0.25 % of a processor under emulation.
		//
		// No lockup detectors: a guest that was stopped for an hour looks locked up.
		"nowatchdog", "rcupdate.rcu_cpu_stall_suppress=1",
		// Pressure statistics are averaged every two seconds; compaction runs twice a second; counters of pages are
		// folded once a second.
		"psi=0", "sysctl.vm.compaction_proactiveness=0", "sysctl.vm.stat_interval=120",
		// One byte written to a huge page is 2 MiB of zeros in the delta: the first large process of a sandbox dirties
		// 16 MiB instead of 22.
		"transparent_hugepage=never",
	}
	switch arch {
	case "amd64":
		words = append(words,
			// Under KVM the paravirtual clock, which a VMM can set at restore; where there is none (emulation), the
			// kernel takes the TSC, and "reliable" ends the twice-a-second comparison that would declare it broken
			// after a restore.
			"clocksource=kvm-clock", "tsc=reliable",
			// No asynchronous page faults: their state is in guest memory and is meaningless after a restore.
			"no-kvmapf",
		)
	case "arm64":
		words[0] = "console=ttyAMA0"
	}
	return strings.Join(words, " ")
}
