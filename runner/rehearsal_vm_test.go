package runner

import (
	"context"
	"os"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/pager"
)

// TestRehearsalVM rehearses a fork of a real template: what is learned is exact, once, leaves nothing, and a rehearsal without a pager is none.
func TestRehearsalVM(t *testing.T) {
	testvm.Image(t)
	dir, err := os.MkdirTemp("", "pager") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	process := &pager.Process{Dir: dir, Command: []string{os.Args[0], beAPager}, Config: []byte(dir)}
	r := newRig(t, func(c *Config) { c.Store.Pager = process })
	t.Cleanup(func() { // before the runner's end
		ctx := context.WithoutCancel(t.Context()) // the test has ended
		if err := pager.NewClient(pager.SocketPath(dir)).Stop(ctx); err != nil && pager.Runs(ctx, *process) {
			t.Error(err)
		}
	})
	id := r.template()
	ckpt, err := r.checkpoints.Open(id)
	if err != nil {
		t.Fatal(err)
	}
	defer ckpt.Close()
	rehearsals{r.Runner}.Rehearse(t.Context(), ckpt)
	set := r.lazy.WorkingSets.Of(ckpt.Base)
	ranges := lazy.DecodeWorkingSet(set.Pages, ckpt.Memory.Size/memory.PageSize)
	var pages int64
	for _, p := range ranges {
		pages += p.Count
	}
	t.Logf("a fork uses %.1f MiB of %d until its first command has run, in %d ranges", float64(pages)*memory.PageSize/(1<<20), ckpt.Memory.Size>>20, len(ranges))
	if share := float64(pages) * memory.PageSize / float64(ckpt.Memory.Size); !set.Rehearsed || share < 0.005 || share > 0.15 {
		t.Errorf("rehearsed %v, %.3f of the memory", set.Rehearsed, share)
	}
	client := pager.NewClient(pager.SocketPath(dir))
	eventually.True(t, "nothing of the rehearsal is left", func() bool {
		images, _, err := client.List(t.Context())
		shells, dirErr := os.ReadDir(r.shellsDir())
		return err == nil && dirErr == nil && len(images) == 0 && len(shells) == 0 && len(r.all()) == 0
	})
	// Once is enough.
	before := r.lazy.WorkingSets.Of(ckpt.Base)
	rehearsals{r.Runner}.Rehearse(t.Context(), ckpt)
	if after := r.lazy.WorkingSets.Of(ckpt.Base); &after.Pages[0] != &before.Pages[0] {
		t.Error("it was rehearsed again")
	}
	// A pager that is killed in the middle costs the rehearsal, and nothing else.
	r.lazy.WorkingSets = lazy.WorkingSets{} // or there would be no other rehearsal
	hello, err := client.Hello(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		rehearsals{r.Runner}.Rehearse(t.Context(), ckpt)
	}()
	r.awaitShell()
	p, err := os.FindProcess(hello.PID)
	if err == nil {
		err = p.Kill()
	}
	if err != nil {
		t.Fatal(err)
	}
	<-done
	if set := r.lazy.WorkingSets.Of(ckpt.Base); !set.Rehearsed || set.Pages != nil {
		t.Errorf("after a rehearsal that failed: %v of %d bytes", set.Rehearsed, len(set.Pages))
	}
	r.sh(r.fork(id), "true")
}
