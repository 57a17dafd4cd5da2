package explore

import (
	"flag"
	"testing"

	"github.com/coppice-dev/coppice/internal/testleak"
	"github.com/coppice-dev/coppice/internal/testpg"
)

var only = flag.Int("explore.schedule", 0, "the number of the only schedule that TestExplore runs")

func TestMain(m *testing.M) { testleak.Main(m, testpg.Leak()) }
