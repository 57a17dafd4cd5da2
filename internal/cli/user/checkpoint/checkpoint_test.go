package checkpoint

import (
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestTables(t *testing.T) {
	t.Parallel()
	now := clitest.Dawn.Add(3 * time.Hour)
	var b strings.Builder
	b.WriteString("-- checkpoints\n")
	if err := printCheckpoints(&b, now, clitest.Convert[[]coppice.Checkpoint](t, []api.Checkpoint{clitest.Checkpoint(1, 0, nil), clitest.Checkpoint(2, 1, nil)})); err != nil {
		t.Error(err)
	}
	sealed, failed := clitest.Checkpoint(3, 2, nil), clitest.Checkpoint(4, 3, nil)
	sealed.State, sealed.SealedAt, sealed.StoredBytes = api.CheckpointSealed, clitest.Dawn, 700<<10
	failed.Seal = &api.Seal{State: api.SealFailed, Attempt: 3, Problem: &api.Failure{Code: "STORE_UNAVAILABLE", Message: "the store is away"}}
	for _, cp := range clitest.Convert[[]coppice.Checkpoint](t, []api.Checkpoint{sealed, failed}) {
		b.WriteString("-- a checkpoint and the store: " + stored(cp) + "\n" + sealing(cp) + "\n")
	}
	clitest.Golden(t, "tables.txt", b.String())
}

func TestTree(t *testing.T) {
	t.Parallel()
	f := clitest.SampleTree()
	nodes := clitest.Convert[[]coppice.TreeNode](t, f.Tree(clitest.ID("ckpt", 1)))
	nodes[3].EffectsCount = 2
	var b strings.Builder
	if err := printTrees(&b, clitest.Dawn.Add(time.Hour), [][]coppice.TreeNode{nodes, nodes[:1]}); err != nil {
		t.Error(err)
	}
	clitest.Golden(t, "tree.txt", b.String())
}
