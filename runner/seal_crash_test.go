package runner

import (
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/internal/test/eventually"
)

// TestCrashInSeal ends a runner at every step of a seal: its successor seals the checkpoint, once, and what it was can be forked elsewhere.
func TestCrashInSeal(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	for _, point := range []string{"seal.begun", "seal.written", "seal.committed"} {
		t.Run(point, func(t *testing.T) { //nolint:paralleltest // see above
			p := newSealPool(t)
			r := newFakeRig(t, func(c *Config) { c.Store.Blobs = p.blobs })
			template := r.boot()
			c := r.capture(r.fork(template))
			before := r.Runner
			ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
			ended := make(chan struct{})
			armed := hang(t, point, func() {
				defer close(ended)
				_ = before.Seal(ctx, p.ledger, func() (int64, bool) { return 1, true })
			})
			cleanup := r.crash(armed)
			defer func() {
				cancel()
				<-ended
				cleanup()
			}()
			r.start()
			p.seal(r)
			p.sealed(t, template, c)
			if n := p.attempts[c]; n != 1 {
				t.Errorf("%d attempts for what was not begun", n)
			}
			if want := map[string]int64{"seal.begun": 2, "seal.written": 2, "seal.committed": 1}[point]; p.attempts[template] != want {
				t.Errorf("%d attempts, want %d", p.attempts[template], want)
			}
			other := p.runner(nil)
			out, err := other.Fork(t.Context(), runnerapi.Fork{CheckpointID: c, Children: []runnerapi.Child{other.child()}, Sources: p.sources(c, template)})
			if err != nil || out.Children[0].Problem != nil {
				t.Fatalf("%+v, %v", out, err)
			}
			wantSame(t, r, other, c)
		})
	}
}

// awaitWrites waits until the steps beside the one that hangs have stopped writing: those of a process that was killed do not go on.
func (r *fakeRig) awaitWrites() {
	r.t.Helper()
	const looks = 50
	last, same := "", 0
	eventually.True(r.t, "nothing is written any more", func() bool {
		now := ""
		_ = filepath.WalkDir(filepath.Join(r.cfg.DataDir, "checkpoints"), func(path string, d fs.DirEntry, _ error) error {
			if d != nil {
				if info, err := d.Info(); err == nil {
					now += fmt.Sprintln(path, info.Size(), info.ModTime())
				}
			}
			return nil
		})
		if now != last {
			last, same = now, 0
		}
		same++
		return same >= looks
	})
}

// TestCrashInFetch ends a runner at every step in which it brings a checkpoint from the store: nothing of it is left, and the same fork
// can be asked for again.
func TestCrashInFetch(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	for _, point := range []string{"fetch.begun", "fetch.memory", "fetch.written"} {
		t.Run(point, func(t *testing.T) { //nolint:paralleltest // see above
			p := newSealPool(t)
			a := p.runner(nil)
			template := a.boot()
			c := a.capture(a.fork(template))
			p.sealed(t, template, c)
			b := newFakeRig(t, func(cfg *Config) { cfg.Store.Blobs = p.blobs })
			req := runnerapi.Fork{CheckpointID: c, Children: []runnerapi.Child{b.child()}, Sources: p.sources(c, template)}
			before := b.Runner
			armed := hang(t, point, func() { _, _ = before.Fork(context.WithoutCancel(t.Context()), req) })
			cleanup := b.crash(armed)
			b.awaitWrites()
			b.start()
			cleanup()
			b.wantOnly()
			if list := b.Checkpoints(); len(list) > 1 {
				t.Errorf("there are %d checkpoints", len(list))
			}
			bases, err := b.bases.List()
			if err != nil || len(bases) > len(b.Checkpoints()) {
				t.Errorf("%d bases of %d checkpoints, %v", len(bases), len(b.Checkpoints()), err)
			}
			out, err := b.Fork(t.Context(), req)
			if err != nil || out.Children[0].Problem != nil {
				t.Fatalf("the fork was asked for again: %+v, %v", out, err)
			}
			wantSame(t, a, b, c)
			b.wantOnly(out.Children[0].SandboxID)
		})
	}
}
