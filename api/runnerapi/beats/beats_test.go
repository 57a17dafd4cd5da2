package beats_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode"

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

// TestCheckpointsThatComeAndGo: after any answers, a message names exactly the checkpoints that have come and gone since the last
// list that was recorded.
func TestCheckpointsThatComeAndGo(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	var s beats.Sender
	s.Registered(1)
	held := map[core.CheckpointID]bool{}
	var recorded map[core.CheckpointID]bool // nil: nothing is
	for range 2000 {
		for range r.IntN(4) {
			id := core.CheckpointID(fmt.Sprintf("ckpt_%d", r.IntN(20)))
			if held[id] = !held[id]; !held[id] {
				delete(held, id)
			}
		}
		b := s.Begin()
		b.Checkpoints = slices.Collect(maps.Keys(held))
		m := s.Make(b)
		if d := m.Differences; d == nil {
			if recorded != nil {
				t.Fatal("a whole message after an answer")
			}
		} else {
			var came, gone []core.CheckpointID
			var sum int64
			for id := range held {
				if recorded[id] {
					sum ^= beats.Sum(id)
				} else {
					came = append(came, id)
				}
			}
			for id := range recorded {
				if !held[id] {
					gone = append(gone, id)
				}
			}
			if d.CheckpointSum != sum || !sameSet(d.Checkpoints, came) || !sameSet(d.GoneCheckpoints, gone) || d.AllCheckpoints != (recorded == nil) {
				t.Fatalf("the message is %+v; came %v, gone %v, sum %d", d, came, gone, sum)
			}
		}
		out := runnerapi.Heartbeated{Number: m.Whole.Number, AllSandboxes: r.IntN(20) == 0, AllCheckpoints: r.IntN(20) == 0}
		if len(m.Whole.Checkpoints) > 0 && r.IntN(5) == 0 {
			out.Unsettled = m.Whole.Checkpoints[:1]
		}
		if r.IntN(10) == 0 {
			out.Number--
		}
		s.Answered(m, out)
		recorded = nil
		if out.Number == m.Whole.Number && !out.AllCheckpoints {
			recorded = maps.Clone(held)
			for _, id := range out.Unsettled {
				delete(recorded, id)
			}
		}
		if r.IntN(20) == 0 {
			s.Unanswered()
			recorded = nil
		}
	}
}

// sameSet says whether two lists have the same ids, in any order.
func sameSet(a, b []core.CheckpointID) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// TestUsage: a message with differences has the usage of a sandbox at first, and then only after a while; of an ended one until it is answered.
func TestUsage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s beats.Sender
		s.Registered(1)
		for i, c := range []struct {
			list     string // the sandboxes whose usage the runner knows; a capital letter: an ended one
			answered bool
			want     string
		}{
			{list: "ab", answered: true, want: "ab"}, // a whole list
			{list: "ab", answered: true},
			{list: "abc", want: "c"},
			{list: "abc", answered: true, want: "abc"}, // a whole list, because there was no answer
			{list: "aBc", answered: true, want: "B"},
			{list: "ac", answered: true},
			{list: "ac", answered: true, want: "ac"}, // 27 s after the last time
			{list: "abc", answered: true, want: "b"},
		} {
			b := s.Begin()
			for _, name := range c.list {
				b.Usage = append(b.Usage, runnerapi.Usage{SandboxID: core.SandboxID(strings.ToLower(string(name))), Ended: unicode.IsUpper(name)})
			}
			m := s.Make(b)
			sent := m.Whole.Usage
			if m.Differences != nil {
				sent = m.Differences.Usage
			}
			got := ""
			for _, u := range sent {
				name := string(u.SandboxID)
				if u.Ended {
					name = strings.ToUpper(name)
				}
				got += name
			}
			if got != c.want {
				t.Errorf("message %d has the usage of %q, want %q", i, got, c.want)
			}
			if c.answered {
				s.Answered(m, runnerapi.Heartbeated{Number: m.Whole.Number})
			} else {
				s.Unanswered()
			}
			time.Sleep(9 * time.Second) // the clock is synctest's
		}
	})
}
