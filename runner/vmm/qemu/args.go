package qemu

import (
	"fmt"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// AgentPort is the name of the virtio-serial port that the guest agent listens on.
const AgentPort = "coppice.agent"

// agentChardev is QEMU's name of the host's end of that port.
const agentChardev = "agent"

// descriptors are the numbers of the VMM's inherited files in its process. 0 stands for a file that it does not get.
type descriptors struct {
	monitor, agent, console int // listening unix sockets
	base, kernel, initrd    int
	disks                   []int
	tap                     int
}

// profile is the part of the command line that depends on the version of QEMU and on the accelerator.
type profile struct {
	machineType  string
	accelerator  string
	readOnlyBase bool
	tscKHz       uint64 // of the host, for kernels that boot under TCG; 0: unknown
}

// What emulation does badly is left out of it. With the ERMS flag the guest's kernel clears and copies pages by "rep movsb",
// which TCG does byte by byte: without it the image boots in 3.0 s instead of 4.2. FSRM must go with it: QEMU 10 has it, and a 6.1
// kernel that sees it takes ERMS for granted and hangs early in its boot. Mitigations of speculative execution, which
// TCG has none of, cost 8 % of a fork's CPU time (both measured under other load, medians of six). The kernel's check of
// the timer at boot expects interrupts within milliseconds; on a busy host they come later, and the kernel panics in
// setup_IO_APIC.
const (
	tcgCPU    = "max,erms=off,fsrm=off"
	tcgKernel = "mitigations=off no_timer_check"
)

// arguments returns the command line of a machine. It is a pure function, and equal for all machines of one shape, so
// that one machine can load the device state of another: nothing in it names a sandbox, except -name.
func arguments(p profile, s vmm.Spec, fd descriptors) []string {
	accel, cpu, kernel := acceleratorArguments(p)
	ram := fmt.Sprintf("memory-backend-file,id=ram,size=%dM,mem-path=/proc/self/fd/%d,share=off", s.MemoryMiB, fd.base)
	if p.readOnlyBase {
		ram += ",readonly=on,rom=off"
	}
	a := []string{
		"-name", nameOf(s.Cluster, s.ID),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-sandbox", sandbox,
		"-M", p.machineType + ",memory-backend=ram,dump-guest-core=off,suppress-vmdesc=on,usb=off,vmport=off,smm=off,hpet=off,graphics=off",
		"-accel", accel, "-cpu", cpu, "-smp", fmt.Sprint(s.VCPUs), "-m", fmt.Sprintf("%dM", s.MemoryMiB),
		"-object", ram,
		"-global", "migration.send-configuration=off", "-global", "migration.store-global-state=off",
		"-chardev", fmt.Sprintf("socket,id=monitor,fd=%d,server=on,wait=off", fd.monitor), "-mon", "chardev=monitor,mode=control",
		"-chardev", fmt.Sprintf("socket,id=console,fd=%d,server=on,wait=off", fd.console), "-serial", "chardev:console",
		"-device", "virtio-serial-pci,id=serial,max_ports=2,disable-legacy=on",
		"-chardev", fmt.Sprintf("socket,id=%s,fd=%d,server=on,wait=off", agentChardev, fd.agent),
		"-device", "virtserialport,bus=serial.0,nr=1,chardev=" + agentChardev + ",name=" + AgentPort,
		"-object", "rng-builtin,id=rng", "-device", "virtio-rng-pci,rng=rng,disable-legacy=on",
	}
	for i, d := range s.Disks {
		a = append(a,
			"-add-fd", fmt.Sprintf("fd=%d,set=%d", fd.disks[i], i+1),
			"-blockdev", fmt.Sprintf("driver=file,node-name=disk%d,filename=/dev/fdset/%d,read-only=%s,discard=unmap,locking=off,cache.no-flush=on", i, i+1, onOff(d.ReadOnly)),
			// By default, a full host disk stops the machine without any report; a guest can handle an I/O error.
			"-device", fmt.Sprintf("virtio-blk-pci,drive=disk%d,serial=%s,disable-legacy=on,werror=report,rerror=report", i, d.Serial))
	}
	if fd.tap != 0 {
		a = append(a,
			"-netdev", fmt.Sprintf("tap,id=net,fd=%d,vhost=off", fd.tap),
			"-device", fmt.Sprintf("virtio-net-pci,netdev=net,mac=%s,romfile=,disable-legacy=on", s.MAC))
	}
	if s.Restore {
		// The kernel has been in the guest's memory since the cold boot. Leaving it out here saves reading it, and 30
		// MiB.
		return append(a, "-S", "-incoming", "defer")
	}
	return append(a, "-S", "-kernel", fmt.Sprintf("/proc/self/fd/%d", fd.kernel),
		"-initrd", fmt.Sprintf("/proc/self/fd/%d", fd.initrd), "-append", strings.TrimSpace(s.CommandLine+kernel))
}

// nameOf returns the name of a machine, for people and for Reap.
func nameOf(cluster string, id core.SandboxID) string {
	return fmt.Sprintf("coppice-%s-%s", cluster, id)
}

// sandbox forbids the system calls that QEMU needs only for features that are not used here.
const sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"

// acceleratorArguments are -accel, -cpu and what the kernel is told besides.
func acceleratorArguments(p profile) (accel, cpu, kernel string) {
	if p.accelerator == acceleratorKVM {
		return "kvm", "host,migratable=on", ""
	}
	return "tcg,thread=multi", tcgCPU, " " + tcgKernel + tscArgument(p.tscKHz)
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}
