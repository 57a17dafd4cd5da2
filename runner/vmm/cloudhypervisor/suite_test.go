package cloudhypervisor_test

import (
	"os"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner/vmm/cloudhypervisor"
	"github.com/coppice-dev/coppice/runner/vmm/vmmtest"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// TestConformance uses the fake VMM, which needs no KVM; kvm_test.go uses the real one.
func TestConformance(t *testing.T) {
	t.Parallel()
	vmmtest.Run(t, func(t *testing.T) vmmtest.Fixture {
		t.Helper()
		fake := testvm.BuildFakeCloudHypervisor(t)
		return vmmtest.Fixture{
			Driver: cloudhypervisor.New(cloudhypervisor.Config{Binary: fake.Path}), Kernel: fake.Path, Initrd: os.DevNull,
			CommandLine: "console=ttyS0", MemoryMiB: 4,
		}
	})
}
