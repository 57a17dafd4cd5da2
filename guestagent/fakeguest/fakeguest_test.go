package fakeguest_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/fakeguest"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// ask sends a request to a guest. The status must be below 400.
func ask[T any](t *testing.T, g http.Handler, method, path string, in any) (out T) {
	t.Helper()
	body, ok := in.([]byte)
	if !ok {
		var err error
		if body, err = json.Marshal(in); err != nil {
			t.Fatal(err)
		}
	}
	rec := httptest.NewRecorder()
	g.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), method, path, bytes.NewReader(body)))
	b, err := io.ReadAll(rec.Body)
	if err != nil || rec.Code >= http.StatusBadRequest {
		t.Fatalf("%s %s: %d %s (%v)", method, path, rec.Code, b, err)
	}
	if text, ok := any(&out).(*string); ok {
		*text = string(b)
	} else if err := json.Unmarshal(b, &out); err != nil {
		t.Fatalf("%s %s: %s: %v", method, path, b, err)
	}
	return out
}

func route(pattern string, id core.SessionID) string {
	return strings.Replace(pattern, "{id}", string(id), 1)
}

// busy makes a guest with files, a watch with events, a program that waits for stdin and one that sleeps.
func busy(t *testing.T) (g *fakeguest.Guest, reads, sleeps guestapi.Session) {
	t.Helper()
	g = fakeguest.New(fakeguest.InProcess(fakeguest.NewState()), nil)
	t.Cleanup(g.End)
	ask[guestapi.Watch](t, g, http.MethodPost, guestapi.PathWatches, guestapi.CreateWatch{Path: "/workspace", Recursive: true})
	ask[guestapi.FileInfo](t, g, http.MethodPut, guestapi.PathFiles+"?path=/workspace/a/b", []byte("text"))
	ask[guestapi.FileInfo](t, g, http.MethodPost, guestapi.PathXAttrs, guestapi.SetXAttrs{Path: "/workspace/a/b", Set: map[string]string{"user.a": "1"}})
	reads = ask[guestapi.Session](t, g, http.MethodPost, guestapi.PathSessions, guestapi.SessionSpec{Command: []string{"sh", "-c", "echo first; cat; env"}, Env: map[string]string{"A": "b"}, StdinOpen: true})
	sleeps = ask[guestapi.Session](t, g, http.MethodPost, guestapi.PathSessions, guestapi.SessionSpec{Command: []string{"sh", "-c", "sleep 0.2; echo awake"}})
	return g, reads, sleeps
}

// TestStateIsAValue: the state that is stored and read again is the same.
func TestStateIsAValue(t *testing.T) {
	t.Parallel()
	g, _, _ := busy(t)
	want := g.State()
	b, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	got := new(fakeguest.State)
	if err := json.Unmarshal(b, got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("the state (-before +after):\n%s", diff)
	}
}

// TestForkGoesOn: in a fork the programs go on, and neither guest sees what the other does.
func TestForkGoesOn(t *testing.T) {
	t.Parallel()
	parent, reads, sleeps := busy(t)
	child := fakeguest.New(fakeguest.InProcess(parent.State()), nil)
	t.Cleanup(child.End)
	for name, g := range map[string]*fakeguest.Guest{"parent": parent, "child": child} {
		ask[guestapi.FileInfo](t, g, http.MethodPut, guestapi.PathFileContent+"?in_place=1&append=1&path=/workspace/a/b", []byte(" of "+name))
		ask[string](t, g, http.MethodPost, route(guestapi.PathSessionStdin, reads.ID)+"?close=1", []byte(name+"\n"))
	}
	for name, g := range map[string]*fakeguest.Guest{"parent": parent, "child": child} {
		for id, want := range map[core.SessionID]string{reads.ID: "first\n" + name + "\nA=b\n", sleeps.ID: "awake\n"} {
			if s := ask[guestapi.Session](t, g, http.MethodGet, route(guestapi.PathSessionWait, id), nil); s.ExitCode == nil || *s.ExitCode != 0 {
				t.Errorf("%s: the session ended as %+v", name, s)
			}
			if got := ask[string](t, g, http.MethodGet, route(guestapi.PathSessionOutput, id), nil); got != want {
				t.Errorf("%s: the output is %q, want %q", name, got, want)
			}
		}
		if got, want := ask[string](t, g, http.MethodGet, guestapi.PathFiles+"?path=/workspace/a/b", nil), "text of "+name; got != want {
			t.Errorf("%s: the file is %q, want %q", name, got, want)
		}
		list := ask[guestapi.Watches](t, g, http.MethodGet, guestapi.PathWatches, nil)
		if len(list.Watches) != 1 || list.Watches[0].Last != 3 {
			t.Errorf("%s: the watches are %+v", name, list.Watches)
		}
	}
}

// TestFrozenProgramsSleep: time has no effect on a frozen workload, and hooks reach every step.
func TestFrozenProgramsSleep(t *testing.T) {
	t.Parallel()
	refused := errors.New("not now")
	var steps []string
	g := fakeguest.New(fakeguest.InProcess(fakeguest.NewState()), func(_ context.Context, step string) error {
		if steps = append(steps, step); step == "agent.flush" {
			return refused
		}
		return nil
	})
	t.Cleanup(g.End)
	s := ask[guestapi.Session](t, g, http.MethodPost, guestapi.PathSessions, guestapi.SessionSpec{Command: []string{"sleep", "1000"}, TimeoutMS: 20})
	q := ask[guestapi.QuiesceResponse](t, g, http.MethodPost, guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: "c"})
	rec := httptest.NewRecorder()
	g.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), http.MethodPost, guestapi.PathFlush, strings.NewReader("{}")))
	if rec.Code != http.StatusInternalServerError {
		t.Errorf("the hook's error is answered with %d", rec.Code)
	}
	if got := g.State().Sessions[0].State; q.Processes == 1 && got != guestapi.SessionRunning {
		t.Errorf("the frozen session is %s", got)
	}
	entropy := bytes.Repeat([]byte("x"), guestapi.EntropySize)
	ask[guestapi.ReseedResponse](t, g, http.MethodPost, guestapi.PathReseed, guestapi.ReseedRequest{Entropy: entropy, Generation: q.Generation})
	ask[guestapi.ReleaseResponse](t, g, http.MethodPost, guestapi.PathRelease, guestapi.ReleaseRequest{Generation: q.Generation})
	if s := ask[guestapi.Session](t, g, http.MethodGet, route(guestapi.PathSessionWait, s.ID), nil); !s.TimedOut || s.Signal != "SIGKILL" {
		t.Errorf("the session ended as %+v", s)
	}
	want := []string{"agent.public", "agent.quiesce", "agent.flush", "agent.reseed", "reseal.entropy", "agent.release", "agent.public"}
	if diff := cmp.Diff(want, steps); diff != "" {
		t.Errorf("the hook saw (-want +got):\n%s", diff)
	}
}
