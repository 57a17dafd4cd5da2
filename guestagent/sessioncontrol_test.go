//go:build linux

package guestagent

import (
	"net/http"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// TestSignalTargets: each target reaches its processes and no others. The program is a shell that says which signals it
// got, and a child in the same process group that does too.
func TestSignalTargets(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	const child = `trap "echo child; exit" TERM; echo up; while kill -0 $1 2>/dev/null; do sleep 0.1; done` // ends with its parent
	for target, want := range map[string]string{"": "both", guestapi.TargetForeground: "both", guestapi.TargetGroup: "both", guestapi.TargetSession: "both", guestapi.TargetProcess: "parent"} {
		t.Run("target "+target, func(t *testing.T) {
			t.Parallel()
			s := a.start(guestapi.SessionSpec{Command: []string{"sh", "-c", `sh -c '` + child + `' sh $$ & trap 'echo parent; exit' TERM; echo up; while :; do wait $!; done`}})
			eventually(t, func() bool {
				out, _ := a.output(s.ID, "") //nolint:bodyclose // output has read and closed it
				return strings.Count(out, "up") == 2
			})
			if _, err := ask[struct{}](a, http.MethodPost, a.route(guestapi.PathSessionSignal, s.ID), guestapi.Signal{Signal: "TERM", Target: target}); err != nil {
				t.Fatal(err)
			}
			a.wait(s.ID)
			if want == "both" {
				eventually(t, func() bool {
					out, _ := a.output(s.ID, "") //nolint:bodyclose // output has read and closed it
					return strings.Contains(out, "child") && strings.Contains(out, "parent")
				})
				return
			}
			if out, _ := a.output(s.ID, ""); !strings.Contains(out, "parent") || strings.Contains(out, "child") { //nolint:bodyclose // likewise
				t.Errorf("%q", out)
			}
		})
	}
	s := a.start(guestapi.SessionSpec{Command: []string{"sleep", "600"}})
	if _, err := ask[struct{}](a, http.MethodPost, a.route(guestapi.PathSessionSignal, s.ID), guestapi.Signal{Signal: "TERM", Target: "all"}); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("another target: %v", err)
	}
}

func TestDeadline(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	set := func(id core.SessionID, ms int64) error {
		_, err := ask[struct{}](a, http.MethodPost, a.route(guestapi.PathSessionDeadline, id), guestapi.Deadline{TimeoutMS: ms})
		return err
	}
	long := a.start(guestapi.SessionSpec{Command: []string{"sleep", "600"}, TimeoutMS: 500_000})
	if err := set(long.ID, 1); err != nil {
		t.Fatal(err)
	}
	if s := a.wait(long.ID); !s.TimedOut || s.Signal != "SIGKILL" {
		t.Errorf("%+v", s)
	}
	if err := set(long.ID, 1); core.CodeOf(err) != guestapi.CodeSessionEnded {
		t.Errorf("it has ended: %v", err)
	}
	// A deadline that is taken back does not come.
	none := a.start(guestapi.SessionSpec{Command: []string{"sh", "-c", "read x; exit 3"}, StdinOpen: true, TimeoutMS: 3_600_000})
	if err := set(none.ID, 0); err != nil {
		t.Fatal(err)
	}
	if live, err := a.sessions.get(none.ID); err != nil || live.timer != nil {
		t.Errorf("a timer is left (%v)", err)
	}
	if err := set(none.ID, -1); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("a negative time: %v", err)
	}
}

func TestOutputFromNow(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	s := a.start(guestapi.SessionSpec{Command: []string{"sh", "-c", "echo before; read x; echo after"}, StdinOpen: true})
	eventually(t, func() bool {
		out, _ := a.output(s.ID, "") //nolint:bodyclose // output has read and closed it
		return out == "before\n"
	})
	if out, res := a.output(s.ID, "from=now"); out != "" || res.Header.Get(guestapi.HeaderOffset) != "7" { //nolint:bodyclose // output has read and closed it
		t.Errorf("%q, offset %s", out, res.Header.Get(guestapi.HeaderOffset))
	}
	got := make(chan string)
	ready := make(chan struct{})
	go func() {
		close(ready)
		out, _ := a.output(s.ID, "from=now&follow=1") //nolint:bodyclose // output has read and closed it
		got <- out
	}()
	<-ready
	live := must[*session](t)(a.sessions.get(s.ID))
	eventually(t, func() bool {
		live.stdout.mu.Lock()
		defer live.stdout.mu.Unlock()
		return len(live.stdout.followers) == 1
	})
	if _, _, err := a.do(http.MethodPost, a.route(guestapi.PathSessionStdin, s.ID), strings.NewReader("x\n")); err != nil { //nolint:bodyclose // do has read and closed it
		t.Fatal(err)
	}
	if out := <-got; out != "after\n" {
		t.Errorf("%q", out)
	}
	if _, _, err := a.do(http.MethodGet, a.route(guestapi.PathSessionOutput, s.ID)+"?from=then", nil); core.CodeOf(err) != core.CodeInvalidField { //nolint:bodyclose // do has read and closed it
		t.Errorf("from another time: %v", err)
	}
}
