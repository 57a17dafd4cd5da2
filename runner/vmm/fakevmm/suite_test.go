package fakevmm_test

import (
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmtest"
)

func TestMain(m *testing.M) { testleak.Main(m) }

func TestConformance(t *testing.T) {
	t.Parallel()
	vmmtest.Run(t, func(*testing.T) vmmtest.Fixture {
		d := fakevmm.New(fakevmm.Config{Guest: fakevmm.Line})
		return vmmtest.Fixture{
			Driver: d, MemoryMiB: 4,
			Crash: func(_ *testing.T, m vmm.Machine) { d.Crash(m.Handle()) },
		}
	})
}
