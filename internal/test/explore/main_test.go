package explore

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testpg"
)

var (
	only   = flag.String("explore.schedule", "", "the numbers of the only schedules that TestExplore runs, with commas; it plays them in one world if it can")
	shards = flag.Int("explore.shards", 0, "how many processes share all schedules; 0: TestExplore runs a sample of them")
	shard  = flag.Int("explore.shard", 0, "which of them this is, from 0")
	match  = flag.String("explore.match", "", "with shards: only schedules that this regular expression matches")
	bound  = flag.Duration("explore.for", 0, "after how long TestExplore begins no more schedules, and fails for those that are left; 0: never")
	list   = flag.Bool("explore.list", false, "only list the schedules")
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == beAnEgressProcess {
		if err := carry(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testleak.Main(m, testpg.Leak())
}
