package main

import (
	"slices"
	"time"
)

// suite is a test binary that is run in the machine.
type suite struct {
	name  string
	pkg   string // directory of the package
	run   string // which of its tests
	tags  string
	args  []string
	env   []string
	limit time.Duration
	// cloudHypervisor says that it needs that binary.
	cloudHypervisor bool
}

// What every suite is told: KVM is demanded, and a requirement that is not met fails.
var laneEnv = []string{
	"COPPICE_TEST_REQUIRE=all", "COPPICE_TEST_PREPARED=" + preparedDir, "COPPICE_ACCELERATOR=kvm",
}

const (
	payloadDir  = "/payload"
	preparedDir = payloadDir + "/prepared"
	chProgram   = payloadDir + "/cloud-hypervisor"
)

// endToEnd are the tests of the whole system that say most of a VMM: it is chosen where it works, what is in memory goes on in every
// fork, and no fork is like another.
const endToEnd = "^(TestDoctor|TestForkWorkspaceAndRestore|TestQuarantineIsSilent|TestReseal)$"

// restsOn are the driver's tests of what a release must do for it.
const restsOn = "^(TestRealPlaceholder|TestRealConfinement|TestRealOracle|TestRealLarge|TestRealConnections|TestRealDiskAgrees|TestRealManyForks|TestRealKilled|TestRealCPUs|TestRealRefusesOtherState)$"

// suites is what the lane runs. Cheap ones first: what they find is not waited for.
var suites = []suite{
	{name: "control groups", pkg: "runner/cgroup", run: ".", env: []string{"COPPICE_TEST_CGROUPS=all"}, limit: 3 * time.Minute},
	{name: "QEMU with KVM: probe", pkg: "runner/vmm/qemu", run: "^TestProbeKVM$", limit: 3 * time.Minute},
	{name: "QEMU with KVM: conformance", pkg: "runner/vmm/qemu", run: "^TestConformance$", limit: 20 * time.Minute},
	{name: "QEMU with KVM: end to end", pkg: "internal/test/e2e", run: endToEnd, args: []string{"-accel", "kvm", "-vmm", "qemu"}, limit: 20 * time.Minute},
	{name: "cloud-hypervisor: probe", pkg: "runner/vmm/cloudhypervisor", run: "^TestRealProbe$", tags: "kvm", limit: 3 * time.Minute, cloudHypervisor: true},
	{name: "cloud-hypervisor: conformance", pkg: "runner/vmm/cloudhypervisor", run: "^TestRealConformance$", tags: "kvm", limit: 20 * time.Minute, cloudHypervisor: true},
	{name: "cloud-hypervisor: what it rests on", pkg: "runner/vmm/cloudhypervisor", run: restsOn, tags: "kvm", limit: 20 * time.Minute, cloudHypervisor: true},
	{name: "cloud-hypervisor: end to end", pkg: "internal/test/e2e", run: endToEnd, args: []string{"-accel", "kvm", "-vmm", "cloud-hypervisor"}, limit: 20 * time.Minute, cloudHypervisor: true},
}

// binary is where the suite's test binary is in the payload, and its working directory.
func (s suite) binary() string { return s.dir() + "/test" }

func (s suite) dir() string {
	dir := payloadDir + "/tests/" + s.pkg
	if s.tags != "" {
		dir += "@" + s.tags
	}
	return dir
}

// command is what runs the suite. One test at a time: what a test starts at once keeps the machine's processors busy, and
// whatever waits for a VMM that hangs does not know that its host is emulated. The binary ends itself a little before the lane would: it knows which test hangs.
func (s suite) command() []string {
	return slices.Concat([]string{
		s.binary(), "-test.v", "-test.count=1", "-test.parallel=1", "-test.timeout=" + (s.limit - 10*time.Second).String(), "-test.run=" + s.run,
	}, s.args)
}

func (s suite) environment() []string {
	env := slices.Concat(laneEnv, s.env)
	if s.cloudHypervisor {
		env = append(env, "COPPICE_CLOUD_HYPERVISOR="+chProgram)
	}
	return env
}
