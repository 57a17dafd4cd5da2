//go:build linux

package sessions

import (
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
)

// TestSignalTargets: each target reaches its processes and no others. The program is a shell that says which signals it
// got, and a child in the same process group that does too.
func TestSignalTargets(t *testing.T) {
	t.Parallel()
	a := newTestServer(t)
	const child = `trap "echo child; exit" TERM; echo up; while kill -0 $1 2>/dev/null; do sleep 0.1; done` // ends with its parent
	for target, want := range map[string]string{"": "both", guestapi.TargetForeground: "both", guestapi.TargetGroup: "both", guestapi.TargetSession: "both", guestapi.TargetProcess: "parent"} {
		t.Run("target "+target, func(t *testing.T) {
			t.Parallel()
			s := a.StartSession(guestapi.SessionSpec{Command: []string{"sh", "-c", `sh -c '` + child + `' sh $$ & trap 'echo parent; exit' TERM; echo up; while :; do wait $!; done`}})
			guesttest.Eventually(t, func() bool {
				out, _ := a.ReadOutput(s.ID, "") //nolint:bodyclose // ReadOutput has read and closed it
				return strings.Count(out, "up") == 2
			})
			if _, err := guesttest.Ask[struct{}](a, http.MethodPost, guesttest.Route(guestapi.PathSessionSignal, s.ID), guestapi.Signal{Signal: "TERM", Target: target}); err != nil {
				t.Fatal(err)
			}
			a.AwaitEnd(s.ID)
			if want == "both" {
				guesttest.Eventually(t, func() bool {
					out, _ := a.ReadOutput(s.ID, "") //nolint:bodyclose // ReadOutput has read and closed it
					return strings.Contains(out, "child") && strings.Contains(out, "parent")
				})
				return
			}
			if out, _ := a.ReadOutput(s.ID, ""); !strings.Contains(out, "parent") || strings.Contains(out, "child") { //nolint:bodyclose // likewise
				t.Errorf("%q", out)
			}
		})
	}
	s := a.StartSession(guestapi.SessionSpec{Command: []string{"sleep", "600"}})
	if _, err := guesttest.Ask[struct{}](a, http.MethodPost, guesttest.Route(guestapi.PathSessionSignal, s.ID), guestapi.Signal{Signal: "TERM", Target: "all"}); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("another target: %v", err)
	}
}

func TestDeadline(t *testing.T) {
	t.Parallel()
	a := newTestServer(t)
	set := func(id core.SessionID, ms int64) error {
		_, err := guesttest.Ask[struct{}](a, http.MethodPost, guesttest.Route(guestapi.PathSessionDeadline, id), guestapi.Deadline{TimeoutMS: ms})
		return err
	}
	long := a.StartSession(guestapi.SessionSpec{Command: []string{"sleep", "600"}, TimeoutMS: 500_000})
	if err := set(long.ID, 1); err != nil {
		t.Fatal(err)
	}
	if s := a.AwaitEnd(long.ID); !s.TimedOut || s.Signal != "SIGKILL" {
		t.Errorf("%+v", s)
	}
	if err := set(long.ID, 1); core.CodeOf(err) != guestapi.CodeSessionEnded {
		t.Errorf("it has ended: %v", err)
	}
	// A deadline that is taken back does not come.
	none := a.StartSession(guestapi.SessionSpec{Command: []string{"sh", "-c", "read x; exit 3"}, StdinOpen: true, TimeoutMS: 3_600_000})
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
	a := newTestServer(t)
	s := a.StartSession(guestapi.SessionSpec{Command: []string{"sh", "-c", "echo before; read x; echo after"}, StdinOpen: true})
	guesttest.Eventually(t, func() bool {
		out, _ := a.ReadOutput(s.ID, "") //nolint:bodyclose // ReadOutput has read and closed it
		return out == "before\n"
	})
	if out, res := a.ReadOutput(s.ID, "from=now"); out != "" || res.Header.Get(guestapi.HeaderOffset) != "7" { //nolint:bodyclose // ReadOutput has read and closed it
		t.Errorf("%q, offset %s", out, res.Header.Get(guestapi.HeaderOffset))
	}
	got := make(chan string)
	ready := make(chan struct{})
	go func() {
		close(ready)
		out, _ := a.ReadOutput(s.ID, "from=now&follow=1") //nolint:bodyclose // ReadOutput has read and closed it
		got <- out
	}()
	<-ready
	live := guesttest.Must[*session](t)(a.sessions.get(s.ID))
	guesttest.Eventually(t, func() bool {
		live.stdout.mu.Lock()
		defer live.stdout.mu.Unlock()
		return len(live.stdout.followers) == 1
	})
	if _, _, err := a.Do(http.MethodPost, guesttest.Route(guestapi.PathSessionStdin, s.ID), strings.NewReader("x\n")); err != nil { //nolint:bodyclose // Do has read and closed it
		t.Fatal(err)
	}
	if out := <-got; out != "after\n" {
		t.Errorf("%q", out)
	}
	if _, _, err := a.Do(http.MethodGet, guesttest.Route(guestapi.PathSessionOutput, s.ID)+"?from=then", nil); core.CodeOf(err) != core.CodeInvalidField { //nolint:bodyclose // Do has read and closed it
		t.Errorf("from another time: %v", err)
	}
}

func TestParseSignal(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]syscall.Signal{"TERM": 15, "sigterm": 15, "SIGKILL": 9, "9": 9, "Int": 2} {
		if got, err := parseSignal(in); err != nil || got != want {
			t.Errorf("%s is %v (%v), want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "0", "-9", "65", "SIGNOTHING", "\x1b[2J"} {
		if got, err := parseSignal(in); err == nil {
			t.Errorf("%q is taken for %v", in, got)
		} else if strings.Contains(err.Error(), "\x1b") {
			t.Errorf("the error repeats what it was given: %q", err)
		}
	}
}
