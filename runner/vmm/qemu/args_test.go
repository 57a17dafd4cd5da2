package qemu

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/runner/vmm"
)

var update = flag.Bool("update", false, "write the golden files again")

// TestArguments compares command lines with golden files: a machine can load the device state of another one only if
// their command lines agree.
func TestArguments(t *testing.T) {
	t.Parallel()
	spec := vmm.Spec{
		ID: "sbx_00000000000000000000000000", Cluster: "c1", VCPUs: 2, MemoryMiB: 512, CommandLine: "console=ttyS0 panic=-1 ",
		Disks: []vmm.Disk{{ReadOnly: true, Serial: "root"}, {Serial: "overlay"}}, MAC: "02:00:00:00:00:01",
	}
	restore := spec
	restore.Restore = true
	old := profile{machineType: "pc-i440fx-7.2", accelerator: acceleratorTCG}
	measured := profile{machineType: "pc-i440fx-7.2", accelerator: acceleratorTCG, tscKHz: 2_596_146}
	recent := profile{machineType: "pc-i440fx-10.0", accelerator: acceleratorTCG, readOnlyBase: true}
	kvm := profile{machineType: "pc-i440fx-10.0", accelerator: acceleratorKVM, readOnlyBase: true}
	boot := descriptors{monitor: 3, agent: 4, console: 5, base: 6, kernel: 7, initrd: 8, disks: []int{9, 10}, tap: 11}
	load := descriptors{monitor: 3, agent: 4, console: 5, base: 6, disks: []int{7, 8}, tap: 9}
	bare := spec
	bare.Disks = nil
	for _, c := range []struct {
		name    string
		profile profile
		spec    vmm.Spec
		fd      descriptors
	}{
		{"boot-7.2", old, spec, boot},
		{"restore-7.2", old, restore, load},
		{"boot-10.0", recent, spec, boot},
		{"boot-tsc", measured, spec, boot},
		{"restore-10.0", recent, restore, load},
		{"boot-kvm", kvm, spec, boot},
		{"restore-kvm", kvm, restore, load},
		{"bare", old, bare, descriptors{monitor: 3, agent: 4, console: 5, base: 6, kernel: 7, initrd: 8}},
	} {
		golden(t, c.name+".args", strings.Join(arguments(c.profile, c.spec, c.fd), "\n")+"\n")
	}
}

// TestArgumentsAreOfTheShape: two machines of one shape differ only in their names.
func TestArgumentsAreOfTheShape(t *testing.T) {
	t.Parallel()
	p := profile{machineType: "pc-i440fx-7.2", accelerator: acceleratorTCG}
	fd := descriptors{monitor: 3, agent: 4, console: 5, base: 6}
	one := vmm.Spec{ID: "sbx_1", Cluster: "a", Dir: "/one", VCPUs: 1, MemoryMiB: 128, UID: 1, GID: 2, Restore: true}
	two := vmm.Spec{ID: "sbx_2", Cluster: "b", Dir: "/two", VCPUs: 1, MemoryMiB: 128, UID: 3, GID: 4, Restore: true}
	a, b := arguments(p, one, fd), arguments(p, two, fd)
	a[1], b[1] = "", "" // -name
	if diff := cmp.Diff(a, b); diff != "" {
		t.Errorf("two machines of one shape differ:\n%s", diff)
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v; cure: go test ./runner/vmm/qemu -update", err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got); go test ./runner/vmm/qemu -update writes it again:\n%s", name, diff)
	}
}
