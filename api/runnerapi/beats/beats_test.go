package beats_test

import (
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/api/runnerapi/beats"
	"github.com/coppice-dev/coppice/core"
)

// TestOneListAgain: a runner that is asked for one of its lists sends that one whole, at once, and of the other the differences.
func TestOneListAgain(t *testing.T) {
	t.Parallel()
	var s beats.Sender
	s.Registered(1)
	next := func() beats.Message {
		b := s.Begin()
		b.Sandboxes = []runnerapi.Sandbox{{ID: "sbx_1"}, {ID: "sbx_2"}}
		b.Checkpoints = []core.CheckpointID{"ckpt_1", "ckpt_2", "ckpt_3"}
		return s.Make(b)
	}
	m := next()
	if m.Differences != nil {
		t.Fatal("the first heartbeat has differences")
	}
	for i, c := range []struct {
		allSandboxes, allCheckpoints bool // that the heartbeat before was asked for
		sandboxes, checkpoints       int  // that are named
	}{
		{false, false, 0, 0},
		{true, false, 2, 0},
		{false, true, 0, 3},
		{false, false, 0, 0},
	} {
		had := m.Differences == nil
		again := s.Answered(m, runnerapi.Heartbeated{Number: m.Whole.Number, AllSandboxes: c.allSandboxes, AllCheckpoints: c.allCheckpoints})
		if want := !had && (c.allSandboxes || c.allCheckpoints); again != want {
			t.Errorf("%d: again: %v, want %v", i, again, want)
		}
		m = next()
		d := m.Differences
		if d == nil || d.AllSandboxes != c.allSandboxes || d.AllCheckpoints != c.allCheckpoints || len(d.Sandboxes) != c.sandboxes || len(d.Checkpoints) != c.checkpoints {
			t.Fatalf("%d: %+v", i, d)
		}
		if d.SandboxSum != beats.Sum("sbx_1", "sbx_2") || (d.CheckpointSum == 0) != c.allCheckpoints {
			t.Errorf("%d: the checksums are %d and %d", i, d.SandboxSum, d.CheckpointSum)
		}
	}
	if s.Answered(m, runnerapi.Heartbeated{Number: m.Whole.Number, AllSandboxes: true, AllCheckpoints: true}); next().Differences != nil {
		t.Error("asked for both lists, it sends differences")
	}
}
