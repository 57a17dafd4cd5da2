package fleet

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// TestBatchesAreBounded: a batch has one heartbeat of each runner, and not more than maxQuiet. The next batch begins when it was taken.
func TestBatchesAreBounded(t *testing.T) {
	t.Parallel()
	var q quietBeats
	for round := range 2 {
		for i := range maxQuiet + 10 {
			id := core.NewID[core.RunnerID]()
			batch, first := q.join(QuietBeat{ID: id})
			if first != (i == 0) || (batch != nil) != (i < maxQuiet) {
				t.Fatalf("round %d: runner %d: first: %v, in the batch: %v", round, i, first, batch != nil)
			}
			if again, first := q.join(QuietBeat{ID: id}); again != nil || first {
				t.Fatal("two heartbeats of a runner in one batch")
			}
		}
		if list := q.take(); len(list) != maxQuiet {
			t.Fatalf("%d heartbeats", len(list))
		}
	}
}

// TestNotQuiet: a heartbeat that would harm the others of a batch is applied alone.
func TestNotQuiet(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*runnerapi.Beat)
		quiet  bool
	}{
		"no news":        {func(*runnerapi.Beat) {}, true},
		"a short text":   {func(b *runnerapi.Beat) { b.Info.KVM = strings.Repeat("k", maxQuietText) }, true},
		"a long text":    {func(b *runnerapi.Beat) { b.Info.KVM = strings.Repeat("k", maxQuietText+1) }, false},
		"a long key":     {func(b *runnerapi.Beat) { b.Info.EgressKey = make([]byte, maxQuietText+1) }, false},
		"a zero byte":    {func(b *runnerapi.Beat) { b.Info.EgressURL = "http://\x00" }, false},
		"no text":        {func(b *runnerapi.Beat) { b.Info.KVM = "\xff" }, false},
		"all sandboxes":  {func(b *runnerapi.Beat) { b.AllSandboxes = true }, false},
		"a sandbox":      {func(b *runnerapi.Beat) { b.Sandboxes = make([]runnerapi.Sandbox, 1) }, false},
		"a checkpoint":   {func(b *runnerapi.Beat) { b.Checkpoints = make([]core.CheckpointID, 1) }, false},
		"one that went":  {func(b *runnerapi.Beat) { b.GoneCheckpoints = make([]core.CheckpointID, 1) }, false},
		"a fetch":        {func(b *runnerapi.Beat) { b.Fetching = make([]core.CheckpointID, 1) }, false},
		"a key":          {func(b *runnerapi.Beat) { b.DataKeys = make([]core.KeyID, 1) }, false},
		"a write":        {func(b *runnerapi.Beat) { b.DataWrites = make([]runnerapi.DataWrite, 1) }, false},
		"a used port":    {func(b *runnerapi.Beat) { b.DataUsed = make([]core.WorkspaceID, 1) }, false},
		"a checksum due": {func(b *runnerapi.Beat) { b.Number, b.Answered = SumEvery, SumEvery-1 }, false},
	} {
		b := runnerapi.Beat{Heartbeat: runnerapi.Heartbeat{Number: 2, Answered: 1}}
		c.change(&b)
		if got := (&beat{h: b.Heartbeat, differences: &b}).quiet(); got != c.quiet {
			t.Errorf("%s: quiet: %v", name, got)
		}
	}
}

// brokenBatches is a store in which heartbeats can be applied alone only.
type brokenBatches struct {
	Store
	Tx
	alone atomic.Int64
}

func (s *brokenBatches) InSystem(_ context.Context, fn func(Tx) error) error { return fn(s) }

func (s *brokenBatches) HeartbeatQuietRunners(context.Context, []QuietBeat, Terms) (map[core.RunnerID]Order, error) {
	return nil, errors.New("broken")
}

func (s *brokenBatches) HeartbeatRunner(context.Context, core.RunnerID, runnerapi.Heartbeat, Terms) (Order, error) {
	s.alone.Add(1)
	return Order{Next: true}, nil
}

func (s *brokenBatches) InsertDataWrites(context.Context, core.RunnerID, string, []runnerapi.DataWrite) error {
	return nil
}

func (s *brokenBatches) InsertUsage(context.Context, core.RunnerID, []runnerapi.Usage) error {
	return nil
}

func (s *brokenBatches) RunnerSandboxes(context.Context, core.RunnerID, SandboxFilter) ([]RunnerSandbox, error) {
	return nil, nil
}

func (s *brokenBatches) SetStalls(context.Context, core.RunnerID, map[core.SandboxID]model.Stall) error {
	return nil
}

func (s *brokenBatches) HeldCheckpoints(context.Context, core.RunnerID, []core.CheckpointID) (RunnerCheckpoints, error) {
	return RunnerCheckpoints{}, nil
}

// TestFailedBatch: when a batch fails, each of its heartbeats is applied alone, also while the controller stops.
func TestFailedBatch(t *testing.T) {
	t.Parallel()
	for _, stopping := range []bool{false, true} {
		const runners = 5
		var store brokenBatches
		f := New(Config{
			Lease: 15 * time.Second, Log: slog.New(slog.DiscardHandler), Certify: func(core.RunnerID, []byte) ([]byte, error) { return nil, nil },
			Go: func(work func(context.Context)) bool {
				if !stopping {
					go work(t.Context())
				}
				return !stopping
			},
		}, &store, nil)
		var all sync.WaitGroup
		for range runners {
			all.Go(func() {
				b := runnerapi.Beat{Heartbeat: runnerapi.Heartbeat{Number: 2, Answered: 1}}
				if out, err := f.Beat(t.Context(), core.NewID[core.RunnerID](), b); err != nil || out.Number != 2 {
					t.Errorf("%+v, %v", out, err)
				}
			})
		}
		all.Wait()
		if n := store.alone.Load(); n != runners {
			t.Errorf("stopping: %v: %d of %d heartbeats were applied alone", stopping, n, runners)
		}
	}
}
