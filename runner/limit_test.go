package runner

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
)

// TestForkMeetsALimit: a child that cannot be made for want of something says of what, whatever step it was at; its siblings and those
// that run are none the worse.
func TestForkMeetsALimit(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err  error
		code core.Code
		says string
	}{
		"disk":        {fmt.Errorf("clone the disk: %w", unix.ENOSPC), core.CodeDiskFull, "delete checkpoints"},
		"quota":       {&os.PathError{Op: "write", Path: "x", Err: unix.EDQUOT}, core.CodeDiskFull, "delete checkpoints"},
		"descriptors": {fmt.Errorf("open a socket: %w", unix.EMFILE), core.CodeCapacity, "LimitNOFILE="},
		"files":       {fmt.Errorf("open a socket: %w", unix.ENFILE), core.CodeCapacity, "fs.file-max"},
		"processes":   {&os.PathError{Op: "fork/exec", Path: "qemu", Err: unix.EAGAIN}, core.CodeCapacity, "TasksMax="},
		"memory":      {fmt.Errorf("map the base: %w", unix.ENOMEM), core.CodeCapacity, "memory"},
		"another":     {errors.New("a fault of ours"), core.CodeForkFailed, "destroyed"},
		"no such":     {&os.PathError{Op: "read", Path: "x", Err: unix.EAGAIN}, core.CodeForkFailed, "destroyed"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newFakeRig(t, func(*Config) {})
			template := r.boot()
			bystander := r.fork(template)
			r.driver.Arm(fakevmm.Fault{Step: fakevmm.StepSpawn, Kind: fakevmm.Fail, Err: c.err, Times: 1})
			out, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: template, Children: []runnerapi.Child{r.child(), r.child()}})
			if err != nil {
				t.Fatal(err)
			}
			failed := 0
			for _, child := range out.Children {
				if p := child.Problem; p == nil {
					r.wantOnly(bystander, child.SandboxID)
				} else if failed++; p.Code != c.code || !strings.Contains(p.Message, c.says) {
					t.Errorf("the problem is %s %q, want %s and %q in it", p.Code, p.Message, c.code, c.says)
				}
			}
			if failed != 1 {
				t.Errorf("%d children failed, want one", failed)
			}
		})
	}
}

// TestForkRepeatedMeanwhile has a fork asked for again while it is under way, as a controller does that was not answered in time: each of the
// requests is answered with the same children, and there is one of each.
func TestForkRepeatedMeanwhile(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(c *Config) { c.Parallel = 3 })
	template := r.boot()
	req := runnerapi.Fork{CheckpointID: template}
	var ids []core.SandboxID
	for range 6 {
		req.Children = append(req.Children, r.child())
		ids = append(ids, req.Children[len(req.Children)-1].SandboxID)
	}
	var wg sync.WaitGroup
	results, errs := make([]runnerapi.ForkResult, 3), make([]error, 3)
	for i := range results {
		wg.Go(func() { results[i], errs[i] = r.Fork(t.Context(), req) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for i, res := range results {
		for k, c := range res.Children {
			if c.Problem != nil || c.Sandbox == nil || c.Sandbox.State != runnerapi.SandboxReady || c.Reseal == nil || !c.Reseal.Complete {
				t.Errorf("request %d, child %d: %+v %+v", i, k, c.Problem, c.Sandbox)
			}
		}
	}
	r.wantOnly(ids...)
}
