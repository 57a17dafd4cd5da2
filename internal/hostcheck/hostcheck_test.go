//go:build linux

package hostcheck

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/require"
)

func TestRun(t *testing.T) {
	t.Parallel()
	good := func(context.Context) Result { return ok("good", "fine") }
	soso := func(context.Context) Result { return warn("so-so", "a cure", "less") }
	bad := func(context.Context) Result { return fail("bad", "a cure", "not") }
	for _, c := range []struct {
		checks []Check
		want   bool
	}{{nil, true}, {[]Check{good, soso}, true}, {[]Check{bad, good}, false}} {
		report, err := Run(t.Context(), c.checks)
		if err != nil || report.OK != c.want || len(report.Checks) != len(c.checks) {
			t.Errorf("got %+v, %v; want ok %v", report, err, c.want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, []Check{good}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
}

// TestThisHost performs the real checks. Those that the tests of this project need anyway must pass.
func TestThisHost(t *testing.T) {
	t.Parallel()
	require.Root(t)
	report, err := Run(t.Context(), Checks(Config{DataDir: filepath.Join(t.TempDir(), "not", "yet"), PGBin: os.Getenv("PGBIN")}))
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]Status{}
	for _, r := range report.Checks {
		t.Logf("%s %s: %s", r.Status, r.Name, r.Detail)
		if _, twice := seen[r.Name]; twice || r.Name == "" || r.Detail == "" || (r.Cure == "") != (r.Status == OK) {
			t.Errorf("bad or repeated result %+v", r)
		}
		seen[r.Name] = r.Status
	}
	for _, name := range []string{"root", "jail", "network-namespaces", "network-settings", "nftables", "tap"} {
		require.That(t, "netns", seen[name] == OK, "see coppice doctor about "+name)
	}
}

func TestNothingIsLeft(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir := t.TempDir()
	for _, check := range []Check{jails, rules, tap, networkNamespaces, settings, files{dev: "/dev"}.reflink(dir)} {
		check(t.Context())
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("the data directory holds %v, %v", left, err)
	}
	if _, err := os.Stat("/sys/class/net/tap0"); err == nil {
		t.Error("tap0 is on the host")
	}
}

// onHost makes this program ask for VMs and print the answer, on a host that a test has made for it.
const onHost = "COPPICE_TEST_ASK_FOR_VMS"

// TestVMs: a host where VMs can run is accepted, and one is refused that lacks what each VM needs, as in a container. The runner of the container would
// look ready, and every fork would fail.
func TestVMs(t *testing.T) {
	t.Parallel()
	require.Root(t)
	err := VMs(t.Context())
	if os.Getenv(onHost) != "" {
		t.Logf("answer: %v", err)
		return
	}
	require.That(t, "netns", err == nil, "see coppice doctor")
	for want, script := range map[string]string{
		"systempaths=unconfined": "mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys",
		"pass /dev/net/tun in":   "mount --bind /dev/null /dev/net/tun",
		"answer: <nil>":          "true",
	} {
		cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-ec", script+`; exec "$0" -test.v -test.run '^TestVMs$'`, os.Args[0])
		cmd.Env = append(os.Environ(), onHost+"=1")
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
			t.Errorf("after %q: %v, want %q in\n%s", script, err, want, out)
		}
	}
}

func TestJudgeQEMU(t *testing.T) {
	t.Parallel()
	for printed, want := range map[string]Status{
		"QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)": Warn,
		"QEMU emulator version 8.1.5":                                    Warn,
		"QEMU emulator version 8.2.0":                                    OK,
		"QEMU emulator version 10.0.13 (Debian)":                         OK,
		"QEMU emulator version 7.1.0":                                    Fail,
		"something else":                                                 Fail,
	} {
		if got := judgeQEMU(printed); got.Status != want {
			t.Errorf("%q: %+v, want %s", printed, got, want)
		}
	}
}

func TestJudgeDisk(t *testing.T) {
	t.Parallel()
	for free, want := range map[uint64]Status{0: Fail, 3 << 30: Fail, 5 << 30: Warn, 100 << 30: OK} {
		if got := judgeDisk("/x", free); got.Status != want {
			t.Errorf("%d bytes free: %+v, want %s", free, got, want)
		}
	}
}

// host makes a tree of kernel files.
func host(t *testing.T, contents map[string]string) files {
	t.Helper()
	dir := t.TempDir()
	for name, content := range contents {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(content), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	return files{proc: filepath.Join(dir, "proc"), sys: filepath.Join(dir, "sys"), dev: filepath.Join(dir, "dev")}
}

func TestKernelFiles(t *testing.T) {
	t.Parallel()
	booted := func(context.Context) (string, error) { return "in 2 s", nil }
	stuck := func(context.Context) (string, error) { return "", errors.New("no output in 10 s") }
	const faults = "sys/devices/system/cpu/vulnerabilities/"
	const header = "Filename Type Size Used Priority\n"
	for _, c := range []struct {
		name  string
		files map[string]string
		check func(files) Check
		want  Status
		says  string
	}{
		{"no kvm", nil, func(f files) Check { return f.kvm(booted) }, Warn, "no /dev/kvm"},
		{"kvm not tried", map[string]string{"dev/kvm": ""}, func(f files) Check { return f.kvm(nil) }, Warn, "proves nothing"},
		{"kvm stuck", map[string]string{"dev/kvm": ""}, func(f files) Check { return f.kvm(stuck) }, Warn, "no output in 10 s"},
		{"kvm works", map[string]string{"dev/kvm": ""}, func(f files) Check { return f.kvm(booted) }, OK, "in 2 s"},
		{"no cgroup v2", nil, func(f files) Check { return cgroups(f.controllers()) }, Warn, "cpu io memory pids"},
		{"few controllers", map[string]string{"sys/fs/cgroup/cgroup.controllers": "cpu hugetlb\n"}, func(f files) Check { return cgroups(f.controllers()) }, Warn, "io memory pids"},
		{"cgroup v2", map[string]string{"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n"}, func(f files) Check { return cgroups(f.controllers()) }, OK, "cpuset cpu io memory pids"},
		{"swap", map[string]string{"proc/swaps": header + "/dev/sda2 partition 1 0 -2\n"}, func(f files) Check { return f.swap }, Warn, "1 swap area"},
		{"no swap", map[string]string{"proc/swaps": header}, func(f files) Check { return f.swap }, OK, "none"},
		{"ksm on", map[string]string{"sys/kernel/mm/ksm/run": "1\n"}, func(f files) Check { return f.samePageMerging }, Warn, "merges"},
		{"ksm off", map[string]string{"sys/kernel/mm/ksm/run": "0\n"}, func(f files) Check { return f.samePageMerging }, OK, "off"},
		{"no ksm", nil, func(f files) Check { return f.samePageMerging }, OK, "has none"},
		{"swap unknown", nil, func(f files) Check { return f.swap }, Warn, "does not say"},
		{"no fault", map[string]string{faults + "meltdown": "Not affected\n", faults + "mds": "Mitigation: Clear CPU buffers; SMT disabled\n"}, func(f files) Check { return f.cpu }, OK, "every fault"},
		{"a fault", map[string]string{faults + "mds": "Vulnerable: Clear CPU buffers attempted, no microcode\n", faults + "l1tf": "Mitigation: PTE Inversion\n"}, func(f files) Check { return f.cpu }, Warn, "does not mitigate mds"},
		{"a fault of KVM", map[string]string{faults + "itlb_multihit": "KVM: Vulnerable\n"}, func(f files) Check { return f.cpu }, Warn, "itlb_multihit"},
		{"faults unknown", nil, func(f files) Check { return f.cpu }, Warn, "does not say"},
		{"smt off", map[string]string{"sys/devices/system/cpu/smt/active": "0\n"}, func(f files) Check { return f.smt }, OK, "off"},
		{"smt safe", map[string]string{"sys/devices/system/cpu/smt/active": "1\n", faults + "mds": "Not affected\n"}, func(f files) Check { return f.smt }, OK, "on;"},
		{"smt open", map[string]string{"sys/devices/system/cpu/smt/active": "1\n", faults + "mds": "Mitigation: Clear CPU buffers; SMT vulnerable\n"}, func(f files) Check { return f.smt }, Warn, "mds"},
		{"smt unknown", map[string]string{"sys/devices/system/cpu/smt/active": "1\n"}, func(f files) Check { return f.smt }, Warn, "does not say"},
		{"no vsock", nil, func(f files) Check { return f.vhostVsock }, Warn, "serial port"},
		{"vsock", map[string]string{"dev/vhost-vsock": ""}, func(f files) Check { return f.vhostVsock }, OK, "can be opened"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			got := c.check(host(t, c.files))(t.Context())
			if got.Status != c.want || !strings.Contains(got.Detail, c.says) {
				t.Errorf("got %+v, want %s with %q", got, c.want, c.says)
			}
		})
	}
}

func TestVMMs(t *testing.T) {
	t.Parallel()
	found := func(path, version string, err error) func(context.Context) (string, string, error) {
		return func(context.Context) (string, string, error) { return path, version, err }
	}
	says := func(detail string, err error) func(context.Context) (string, error) {
		return func(context.Context) (string, error) { return detail, err }
	}
	refused := func(text string) error {
		return core.Errorf(core.FailedPrecondition, core.CodeVMMFailed, "%s", text)
	}
	chooses := func(vmm, why string, err error) func(context.Context) (string, string, error) {
		return func(context.Context) (string, string, error) { return vmm, why, err }
	}
	for name, c := range map[string]struct {
		check      Check
		want       Status
		says, cure string
	}{
		"not installed": {cloudHypervisor(found("", "", refused("it is not installed")), nil), Warn, "it is not installed", "make setup-kvm where KVM works"},
		"too old":       {cloudHypervisor(found("/x", "52.0", refused("it is too old")), nil), Warn, "/x cannot be used: it is too old", "make setup-kvm"},
		"no image":      {cloudHypervisor(found("/x", "53.0", nil), nil), Warn, "/x is version 53.0, which is supported; there is no image", "coppice image build"},
		"does not boot": {cloudHypervisor(found("/x", "53.0", nil), says("", errors.New("nothing in 15s"))), Warn, "nothing in 15s", "see kvm"},
		"boots":         {cloudHypervisor(found("/x", "53.0", nil), says("it booted in 1s", nil)), OK, "which is supported; it booted in 1s", ""},
		"chosen":        {choice(chooses("qemu", "QEMU, tcg (no KVM)", nil)), OK, "VMs would run on QEMU, tcg (no KVM)", ""},
		"no choice":     {choice(chooses("", "", refused("it cannot be used"))), Fail, "it cannot be used", "unset COPPICE_VMM"},
		"no QEMU":       {qemu(Config{QEMU: "/no/such/qemu"}), Fail, "/no/such/qemu does not run", "make setup"},
		"QEMU needed":   {qemu(Config{QEMU: "/no/such/qemu", Choice: chooses("qemu", "", nil)}), Fail, "/no/such/qemu does not run", "make setup"},
		"QEMU not":      {qemu(Config{QEMU: "/no/such/qemu", Choice: chooses("cloud-hypervisor", "", nil)}), Warn, "VMs would run on cloud-hypervisor without it", "make setup"},
	} {
		got := c.check(t.Context())
		if got.Status != c.want || !strings.Contains(got.Detail, c.says) || !strings.Contains(got.Cure, c.cure) || (got.Cure == "") != (c.want == OK) {
			t.Errorf("%s: got %+v, want %s with %q and %q", name, got, c.want, c.says, c.cure)
		}
	}
	if with, without := len(Checks(Config{FindCloudHypervisor: found("", "", nil), Choice: chooses("", "", nil)})), len(Checks(Config{})); with != without+2 {
		t.Errorf("%d checks with, %d without", with, without)
	}
}

func TestNearest(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{dir: dir, filepath.Join(dir, "a", "b"): dir, file: "", filepath.Join(file, "below"): ""} {
		got, err := nearest(path)
		if diff := cmp.Diff(want, got); diff != "" || (err == nil) != (want != "") {
			t.Errorf("%s: %v %s", path, err, diff)
		}
	}
}

func TestCureOfPermission(t *testing.T) {
	t.Parallel()
	want := cureRoot
	if os.Geteuid() == 0 {
		want = "other"
	}
	if got := cureOf(unix.EPERM, "other"); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestJudge: a runner starts with a weakness only where its operator has named it.
func TestJudge(t *testing.T) {
	t.Parallel()
	found := []Result{ok(checkKSM, "off"), warn(checkSwap, "swapoff -a", "1 swap area"), warn(checkSMT, "nosmt", "on")}
	for _, c := range []struct {
		allowed []string
		weak    int
		code    core.Code
		says    string
	}{
		{nil, 0, core.CodeIncompatibleHost, "--allow-weak-host=swap,smt"},
		{[]string{checkSwap}, 1, core.CodeIncompatibleHost, "--allow-weak-host=smt "},
		{[]string{checkSwap, checkSMT}, 2, "", ""},
		{IsolationNames(), 2, "", ""},
		{[]string{"everything"}, 0, core.CodeInvalidField, "cgroup-v2, swap, ksm, cpu, smt"},
	} {
		weak, err := Judge(found, c.allowed)
		if len(weak) != c.weak || (err == nil) != (c.code == "") || err != nil && (core.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%v: got %v, %v; want %d weak, %s with %q", c.allowed, weak, err, c.weak, c.code, c.says)
		}
	}
	if weak, err := Judge(found[:1], nil); err != nil || len(weak) > 0 {
		t.Errorf("a good host: got %v, %v", weak, err)
	}
}
