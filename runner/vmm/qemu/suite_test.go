package qemu_test

import (
	"os"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner/vmm/qemu"
	"github.com/coppice-dev/coppice/runner/vmm/vmmtest"
)

// binary is the QEMU to test: the one on the PATH, or the one that COPPICE_QEMU names.
func binary(t *testing.T) string {
	t.Helper()
	return testvm.QEMU(t, os.Getenv("COPPICE_QEMU"))
}

// accelerator is the accelerator to test with: KVM if COPPICE_ACCELERATOR says so, and then KVM must work; otherwise
// emulation.
func accelerator() string { return os.Getenv("COPPICE_ACCELERATOR") }

func TestConformance(t *testing.T) { //nolint:paralleltest // its machines take both CPUs
	vmmtest.Run(t, func(t *testing.T) vmmtest.Fixture {
		t.Helper()
		path := binary(t)
		guest := testvm.Guest(t)
		f := vmmtest.Fixture{
			Driver: qemu.New(qemu.Config{Binary: path, Accelerator: accelerator()}), Kernel: guest.Kernel, Initrd: guest.Initrd,
			CommandLine: guest.CommandLine, MemoryMiB: 128,
		}
		if os.Geteuid() == 0 {
			f.UID = 64001
		}
		return f
	})
}
