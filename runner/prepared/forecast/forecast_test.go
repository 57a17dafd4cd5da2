package forecast

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func at(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }

func wants(t *testing.T, f *Forecast, limit, seconds int, want ...Want) {
	t.Helper()
	if diff := cmp.Diff(want, f.Wants(limit, at(seconds))); diff != "" {
		t.Errorf("after %d s (-want +got):\n%s", seconds, diff)
	}
}

// TestFirstEvents: a first capture is worth one machine, a first fork as many as it had children. Nothing is expected after a minute.
func TestFirstEvents(t *testing.T) {
	t.Parallel()
	f := New()
	wants(t, f, 4, 0)
	f.Captured("a", "", "x", at(0))
	wants(t, f, 4, 0, Want{"a", 1, "x"})
	wants(t, f, 0, 0)
	f.Forked("a", 3, "x", at(1))
	wants(t, f, 4, 2, Want{"a", 3, "x"})
	wants(t, f, 2, 2, Want{"a", 2, "x"})
	wants(t, f, 4, 62)
	f.Removed("a")
	wants(t, f, 4, 2)
	f.Taken("a", "x") // of nothing known
	f.Lost("a", "x", 1, at(3))
}

// TestSearch: a search captures one checkpoint after the other and forks each once. What was forked is not expected to be forked again, and what
// is captured next is expected to be forked with as many children.
func TestSearch(t *testing.T) {
	t.Parallel()
	f := New()
	var last core.CheckpointID
	for i := range 10 {
		id := core.CheckpointID(fmt.Sprintf("c%d", i))
		f.Captured(id, last, "", at(10*i))
		f.Forked(id, 4, "", at(10*i+5))
		last = id
	}
	f.Captured("next", last, "", at(100))
	wants(t, f, 8, 100, Want{"next", 4, ""})
	if len(f.trees) != 1 {
		t.Errorf("one search makes %d trees", len(f.trees))
	}
}

// TestNewestFirst: where places are few, the newest capture of a search comes before nodes that are forked again and again.
func TestNewestFirst(t *testing.T) {
	t.Parallel()
	f := New()
	var last core.CheckpointID
	for i := range 4 {
		id := core.CheckpointID(fmt.Sprintf("c%d", i))
		f.Captured(id, last, "", at(10*i))
		for j := range 3 {
			f.Forked(id, 2, "", at(10*i+j))
		}
		last = id
	}
	f.Captured("older", last, "", at(39))
	f.Captured("newest", last, "", at(40))
	f.Forked("c0", 2, "", at(41))
	t1 := f.trees[keyOf("c0", "")]
	if again, first := t1.again.rate(), t1.first.rate(); again <= first || first < sureShare {
		t.Fatalf("shares %v and %v: this test is about a tree whose nodes are more often forked again", again, first)
	}
	wants(t, f, 2, 42, Want{"newest", 2, ""})
	wants(t, f, 4, 42, Want{"newest", 2, ""}, Want{"c0", 2, ""})
}

// TestLeaves: where few captures are forked, captures are not prepared, but a checkpoint that is forked again and again is.
func TestLeaves(t *testing.T) {
	t.Parallel()
	f := New()
	f.Captured("root", "", "", at(0))
	for i := range 8 {
		f.Forked("root", 2, "", at(10*i))
		f.Captured(core.CheckpointID(fmt.Sprintf("leaf%d", i)), "root", "", at(10*i+5))
	}
	wants(t, f, 4, 76, Want{"root", 2, ""})
}

// TestPauses: a habit whose machines are not taken gets none for 30 s, then 60 s, and so on, at most an hour. A hit ends that.
func TestPauses(t *testing.T) {
	t.Parallel()
	f := New()
	now := 0
	for _, pause := range []int{30, 60, 120, 240, 480, 960, 1920, 3600, 3600} {
		f.Forked("a", 1, "", at(now))
		wants(t, f, 4, now, Want{"a", 1, ""})
		f.Lost("a", "", 1, at(now))
		wants(t, f, 4, now)
		f.Forked("a", 1, "", at(now+pause-1))
		wants(t, f, 4, now+pause-1)
		f.trees[keyOf("a", "")].again.share, f.trust = share{yes: 1, all: 1}, trust{} // only the habit's pause counts here
		now += pause
		f.Captured("b", "a", "", at(now)) // another habit of the same tree
		f.trees[keyOf("a", "")].first.share = share{}
		if w := f.Wants(4, at(now)); len(w) == 0 || w[0].Checkpoint != "b" && w[len(w)-1].Checkpoint != "b" {
			t.Errorf("a pause of one habit holds up another: %+v", w)
		}
		f.Removed("b")
	}
	f.Forked("a", 1, "", at(now))
	f.Taken("a", "")
	f.trees[keyOf("a", "")].again.losses = 0
	f.Lost("a", "", 1, at(now))
	f.Forked("a", 1, "", at(now))
	wants(t, f, 4, now, Want{"a", 1, ""})
}

// TestTwoAuthorities: forks of one checkpoint with different authorities are learned apart. What is lost for one does not hold up the other.
func TestTwoAuthorities(t *testing.T) {
	t.Parallel()
	f := New()
	for i := range 4 {
		f.Forked("template", 2, "one", at(2*i))
		f.Forked("template", 1, "two", at(2*i+1))
	}
	wants(t, f, 4, 8, Want{"template", 1, "two"}, Want{"template", 2, "one"})
	f.Lost("template", "two", 1, at(8))
	wants(t, f, 4, 9, Want{"template", 2, "one"})
	f.Captured("c", "", "one", at(9))
	f.Captured("d", "c", "one", at(9))
	f.Captured("e", "c", "two", at(9)) // of the same parent, in another project: another tree
	if f.nodes[keyOf("d", "one")].tree != keyOf("c", "one") || f.nodes[keyOf("e", "two")].tree != keyOf("c", "two") {
		t.Error("trees of two authorities are one")
	}
	f.Removed("template")
	for _, w := range f.Wants(8, at(9)) {
		if w.Checkpoint == "template" {
			t.Errorf("%+v of a checkpoint that is gone", w)
		}
	}
}

// TestReplaced: where machines always give way to others before they are taken, the host pauses.
func TestReplaced(t *testing.T) {
	t.Parallel()
	f := New()
	f.Forked("a", 1, "", at(0))
	for range hostPatience - 1 {
		f.Replaced(at(0))
	}
	wants(t, f, 1, 0, Want{"a", 1, ""})
	f.Replaced(at(0))
	wants(t, f, 1, 0)
	wants(t, f, 1, 30, Want{"a", 1, ""})
}

// TestHostPauses: when nothing is taken in many trees, no tree gets machines.
func TestHostPauses(t *testing.T) {
	t.Parallel()
	f := New()
	for i := range hostPatience {
		id := core.CheckpointID(fmt.Sprintf("t%d", i))
		f.Forked(id, 1, "", at(i))
		wants(t, f, 1, i, Want{id, 1, ""})
		f.Lost(id, "", 1, at(i))
	}
	f.Forked("another", 1, "", at(10))
	wants(t, f, 4, 10)
}

// TestFailed: after a failure nothing is prepared before the next fork.
func TestFailed(t *testing.T) {
	t.Parallel()
	f := New()
	f.Forked("a", 1, "", at(0))
	f.Failed("a", "")
	wants(t, f, 4, 1)
	f.Forked("a", 1, "", at(2))
	wants(t, f, 4, 3, Want{"a", 1, ""})
}

// TestBounds: memory is bounded, and the oldest is forgotten.
func TestBounds(t *testing.T) {
	t.Parallel()
	f := New()
	f.Forked("x", 1, strings.Repeat("b", maxAuthority), at(0))
	wants(t, f, 1, 0, Want{"x", 1, strings.Repeat("b", maxAuthority)})
	f.Forked("y", 1, strings.Repeat("b", maxAuthority+1), at(0))
	f.Captured("y", "", strings.Repeat("b", maxAuthority+1), at(0))
	wants(t, f, 4, 0, Want{"x", 1, strings.Repeat("b", maxAuthority)})
	for i := range 3 * maxNodes {
		f.Captured(core.CheckpointID(fmt.Sprintf("c%d", i)), core.CheckpointID(fmt.Sprintf("p%d", i/3)), "", at(i))
		f.Forked(core.CheckpointID(fmt.Sprintf("c%d", i)), 1, "", at(i))
		if len(f.nodes) > maxNodes || len(f.trees) > maxTrees {
			t.Fatalf("%d nodes, %d trees", len(f.nodes), len(f.trees))
		}
	}
	for k, n := range f.nodes {
		if f.trees[n.tree] == nil {
			t.Errorf("the tree of %s is forgotten", k.id)
		}
	}
	if f.nodes[keyOf(core.CheckpointID(fmt.Sprintf("c%d", 3*maxNodes-1)), "")] == nil || f.nodes[keyOf("c0", "")] != nil {
		t.Error("the newest is forgotten, or the oldest is remembered")
	}
}
