package controller_test

import (
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// TestFullDisks: a runner whose disk has no room, by its heartbeat, gets no fork while another has room, also when it holds the
// checkpoint. When none has room the error says so and what to do; nothing is left of the request.
func TestFullDisks(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	_, cp := p.first("main")
	beat := func() {
		p.beat()
		p.beatSecond()
	}
	onFirst := func(n int) (there int) {
		t.Helper()
		for _, ws := range p.fork(cp.ID, n) {
			if ws.Sandbox.RunnerID == p.runner.ID() {
				there++
			}
		}
		return there
	}
	beat()
	if n := onFirst(2); n != 2 {
		t.Errorf("with room everywhere %d of 2 children are where the checkpoint is", n)
	}
	p.runner.SetDiskFree(0)
	beat()
	if n := onFirst(2); n != 0 {
		t.Errorf("%d children were put on a runner without room on its disk", n)
	}
	p.second.SetDiskFree(0)
	beat()
	before := p.usage()
	_, err := p.ForkCheckpoint(t.Context(), p.project, cp.ID, controller.ForkRequest{Count: 2}, wait)
	wantCode(t, err, core.CodeDiskFull)
	if core.CategoryOf(err) != core.Exhausted || !strings.Contains(err.Error(), "delete checkpoints") {
		t.Errorf("%s: %v", core.CategoryOf(err), err)
	}
	_, err = p.CreateWorkspace(t.Context(), p.project, controller.CreateRequest{Name: "new", Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}}, wait)
	wantCode(t, err, core.CodeDiskFull)
	if after := p.usage(); after != before {
		t.Errorf("refused requests took something: %+v, before %+v", after, before)
	}
	p.runner.SetDiskFree(1000)
	beat()
	if n := onFirst(1); n != 1 {
		t.Error("a runner with room again gets nothing")
	}
}
