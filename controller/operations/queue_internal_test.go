package operations

import (
	"slices"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// TestQueueTakesTurns has one project join a line often and another once: the projects take turns, the requests of a project keep their
// order, and one that leaves early takes no turn. The line of another place is free. A full queue takes nobody.
func TestQueueTakesTurns(t *testing.T) {
	t.Parallel()
	const most = 6
	var q queue
	names := map[*waiter]string{}
	join := func(name string, project core.ProjectID) *waiter {
		t.Helper()
		w, ok := q.join("run_1", project, most)
		if !ok {
			t.Fatalf("%s was refused", name)
		}
		names[w] = name
		return w
	}
	first := join("a1", "a")
	join("a2", "a")
	early := join("a3", "a")
	join("a4", "a")
	join("b1", "b")
	if q.busy("run_2") || !q.busy("run_1") {
		t.Error("the wrong place is busy")
	}
	if _, ok := q.join("run_2", "c", most); !ok {
		t.Error("the last place of the queue is refused")
	}
	if _, ok := q.join("run_2", "c", most); ok {
		t.Error("a full queue took one more")
	}
	q.leave(early)
	var order []string
	for w := first; w != nil; {
		order = append(order, names[w])
		select {
		case <-w.turn:
		default:
			t.Fatalf("%s is next, and was not told", names[w])
		}
		q.leave(w)
		w = nil
		if l := q.lines["run_1"]; l != nil {
			w = l.next
		}
	}
	if want := []string{"a1", "a2", "b1", "a4"}; !slices.Equal(order, want) {
		t.Errorf("their turns came in the order %v, want %v", order, want)
	}
	if q.busy("run_1") || q.length != 1 {
		t.Errorf("%d requests are left", q.length)
	}
}
