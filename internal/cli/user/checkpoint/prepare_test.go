package checkpoint

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/cli/exit"
)

// TestPrepare asks for machines, ends that, and looks without asking for anything.
func TestPrepare(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, NewCommand)
	cp := clitest.Checkpoint(1, 0, nil)
	f.Checkpoints, f.FailChild = []api.Checkpoint{cp}, true
	for _, c := range []struct{ args, says string }{
		{"--count 4 --ttl 90s", "0 of 4"}, {"--count 0", "0 of 0"}, {"", "2 of 3 (given up: none was taken)"},
	} {
		status, stdout, stderr := run(append([]string{"ckpt", "prepare", cp.ID}, strings.Fields(c.args)...)...)
		if status != exit.OK || !strings.Contains(stdout, c.says) {
			t.Errorf("%q: status %d, %q, %q", c.args, status, stdout, stderr)
		}
	}
	seconds := []int{90, 120}
	if diff := cmp.Diff([]any{api.PrepareRequest{Count: 4, TTLSeconds: &seconds[0]}, api.PrepareRequest{TTLSeconds: &seconds[1]}}, f.Requests); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
}
