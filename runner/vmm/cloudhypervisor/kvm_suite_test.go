//go:build kvm

// What is in this file needs a cloud-hypervisor binary and a KVM that works: `make test-kvm` runs it in a machine of its own.

package cloudhypervisor_test

import (
	"os"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner/vmm/cloudhypervisor"
	"github.com/coppice-dev/coppice/runner/vmm/vmmtest"
)

// binary is the cloud-hypervisor to test.
func binary(t *testing.T) string {
	t.Helper()
	path := os.Getenv("COPPICE_CLOUD_HYPERVISOR")
	if path == "" {
		t.Fatal("COPPICE_CLOUD_HYPERVISOR names no binary")
	}
	return path
}

func realFixture(t *testing.T) vmmtest.Fixture {
	t.Helper()
	guest := testvm.Guest(t)
	f := vmmtest.Fixture{
		Driver: cloudhypervisor.New(cloudhypervisor.Config{Binary: binary(t)}), Kernel: guest.Kernel, Initrd: guest.Initrd,
		CommandLine: guest.CommandLine, MemoryMiB: 128,
	}
	if os.Geteuid() == 0 {
		f.UID = 64002
	}
	return f
}

func TestRealConformance(t *testing.T) { //nolint:paralleltest // its machines take both CPUs
	vmmtest.Run(t, realFixture)
}

func TestRealProbe(t *testing.T) { //nolint:paralleltest // as above
	guest := testvm.Guest(t)
	d := cloudhypervisor.New(cloudhypervisor.Config{Binary: binary(t)})
	ok, why := d.Probe(t.Context(), guest.Kernel, guest.Initrd, vmmtest.Patience)
	t.Log(why)
	if !ok {
		t.Error("KVM works here, and the probe says that it does not")
	}
}
