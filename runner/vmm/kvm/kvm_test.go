package kvm

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/require"
)

func TestOpen(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "kvm")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"/no/such/device": "/no/such/device cannot be opened: no such file or directory",
		file:              file + " is not the device of KVM: inappropriate ioctl for device",
		"/dev/null":       "/dev/null is not the device of KVM: inappropriate ioctl for device",
	} {
		if err := Open(path); err == nil || err.Error() != want {
			t.Errorf("%s: got %v, want %q", path, err, want)
		}
	}
}

func TestGroup(t *testing.T) {
	t.Parallel()
	require.Root(t) // files are given away
	for _, c := range []struct {
		mode os.FileMode
		gid  int
		want []uint32
		ok   bool
	}{
		{0o660, 108, []uint32{108}, true},
		{0o666, 0, nil, true},
		{0o666, 108, nil, true},
		{0o600, 0, nil, false},
		{0o660, 0, nil, false}, // the root group opens more than KVM
		{0o640, 108, nil, false},
		{0o600, 108, nil, false},
	} {
		path := filepath.Join(t.TempDir(), "kvm")
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(path, 0, c.gid); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, c.mode); err != nil {
			t.Fatal(err)
		}
		got, err := Group(path)
		if (err == nil) != c.ok || fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%v of group %d: got %v, %v", c.mode, c.gid, got, err)
		}
		if err != nil && !strings.Contains(err.Error(), "cure: ") {
			t.Errorf("%v of group %d: no cure in %q", c.mode, c.gid, err)
		}
	}
	if _, err := Group("/no/such/device"); err == nil {
		t.Error("an absent device has a group")
	}
}

func TestHostCPU(t *testing.T) {
	t.Parallel()
	cpu, err := HostCPU()
	if err != nil || !strings.HasPrefix(cpu, "host:") || len(cpu) < 18 {
		t.Fatalf("got %q, %v", cpu, err)
	}
	if again, err := HostCPU(); err != nil || again != cpu {
		t.Errorf("asked again it is %q, %v, not %q", again, err, cpu)
	}
}

const epyc = `processor	: 0
vendor_id	: AuthenticAMD
cpu family	: 25
model		: 1
model name	: AMD EPYC 7763 64-Core Processor
stepping	: 1
microcode	: 0xa0011d1
cpu MHz		: 2445.426
flags		: fpu vme de pse tsc svm npt
bugs		: sysret_ss_attrs
power management:

processor	: 1
vendor_id	: AuthenticAMD
model name	: another one that nobody asks
flags		: fpu
`

const graviton = `processor	: 0
BogoMIPS	: 243.75
Features	: fp asimd evtstrm aes
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x3
CPU part	: 0xd0c
CPU revision	: 1

processor	: 1
BogoMIPS	: 243.75
`

func TestParseCPU(t *testing.T) {
	t.Parallel()
	parse := func(cpuinfo string) string {
		t.Helper()
		cpu, err := parseCPU(cpuinfo)
		if err != nil {
			t.Fatal(err)
		}
		return cpu
	}
	same := parse(epyc)
	if want := "host:AuthenticAMD-25-1-1:AMD EPYC 7763 64-Core Processor:"; !strings.HasPrefix(same, want) || len(same) != len(want)+12 {
		t.Errorf("got %q, want %q and a digest", same, want)
	}
	if got, want := parse(graviton), "host:0x41-8-0x3-0xd0c-1::"; !strings.HasPrefix(got, want) || len(got) != len(want)+12 {
		t.Errorf("got %q, want %q and a digest", got, want)
	}
	replaced := func(old, now string) string {
		if !strings.Contains(epyc, old) {
			t.Fatalf("there is no %q", old)
		}
		return parse(strings.Replace(epyc, old, now, 1))
	}
	for name, cpu := range map[string]string{
		"microcode":      replaced("0xa0011d1", "0xa0011d5"),
		"clock":          replaced("2445.426", "3200.000"),
		"order of flags": replaced("fpu vme de pse", "pse vme fpu de"),
		"bugs":           replaced("sysret_ss_attrs", "sysret_ss_attrs srso"),
	} {
		if cpu != same {
			t.Errorf("another %s: %q is another CPU than %q", name, cpu, same)
		}
	}
	for name, cpu := range map[string]string{
		"vendor":       replaced("AuthenticAMD", "GenuineIntel"),
		"family":       replaced("cpu family	: 25", "cpu family	: 26"),
		"model":        replaced("model		: 1", "model		: 17"),
		"name":         replaced("7763", "7713"),
		"stepping":     replaced("stepping	: 1", "stepping	: 2"),
		"a flag more":  replaced("npt", "npt avx512f"),
		"a flag fewer": replaced(" tsc", ""),
	} {
		if cpu == same {
			t.Errorf("%s: it is still %q", name, cpu)
		}
	}
}

func TestParseCPURefuses(t *testing.T) {
	t.Parallel()
	for name, cpuinfo := range map[string]string{
		"nothing":            "",
		"no flags":           "processor : 0\nvendor_id : AuthenticAMD\n",
		"no vendor or model": "processor : 0\nflags : fpu\n",
	} {
		if cpu, err := parseCPU(cpuinfo); err == nil {
			t.Errorf("%s: got %q", name, cpu)
		}
	}
}
