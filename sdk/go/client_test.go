package coppice_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestMain(m *testing.M) { testleak.Main(m) }

const token = "key_secret"

// serve runs a handler and returns a client for it.
func serve(t *testing.T, h http.Handler) *coppice.Client {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return client(t, srv.URL)
}

func client(t *testing.T, server string) *coppice.Client {
	t.Helper()
	c, err := coppice.New(coppice.Config{Server: server, Token: token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// problem answers with a refusal.
func problem(w http.ResponseWriter, p api.Problem) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(p.Status)
	_ = json.NewEncoder(w).Encode(p)
}

// strict is a server behind the generated interface, so that requests and answers have the form of the contract. It
// keeps workspaces and checkpoints in memory. An operation ends when it is asked for the second time.
type strict struct {
	api.StrictServerInterface

	mu          sync.Mutex
	workspaces  []api.Workspace
	checkpoints map[string]api.Checkpoint
	operations  map[string]api.Operation
	slow        bool // operations do not end within the first request
	conflicts   int  // number of patches to refuse
	problem     *api.Failure
	seen        []any // requests
}

func newStrict(t *testing.T) (*strict, *coppice.Client) {
	t.Helper()
	s := &strict{checkpoints: map[string]api.Checkpoint{}, operations: map[string]api.Operation{}}
	e := echo.New()
	e.Use(func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			if c.Request().Header.Get("Authorization") != "Bearer "+token {
				problem(c.Response(), api.Problem{Status: 401, Code: "UNAUTHENTICATED", Detail: "no key"})
				return nil
			}
			return next(c)
		}
	})
	api.RegisterHandlers(e, api.NewStrictHandler(s, nil))
	return s, serve(t, e)
}

func (s *strict) note(request any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, request)
}

func workspaceNamed(name string) api.Workspace {
	return api.Workspace{
		ID: string(core.NewID[core.WorkspaceID]()), Name: name, State: api.WorkspaceReady, Epoch: 1, Version: 1,
		Labels: api.Labels{}, Network: api.Network{EgressPolicy: api.EgressDenyAll, IP: "10.83.1.2"}, CreatedAt: time.Unix(1, 0).UTC(),
	}
}

// operation makes an operation whose result is v.
func (s *strict) operation(v any) api.Operation {
	b, _ := json.Marshal(v)
	op := api.Operation{ID: string(core.NewID[core.OperationID]()), State: api.OperationRunning, Result: b, Problem: s.problem, Timings: api.Timings{}, WorkspaceIDs: []string{}}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.operations[op.ID] = op
	op.Result, op.Problem = nil, nil
	return op
}

func (s *strict) GetOperation(_ context.Context, r api.GetOperationRequestObject) (api.GetOperationResponseObject, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	op, ok := s.operations[r.OperationID]
	if !ok {
		return api.GetOperationdefaultApplicationProblemPlusJSONResponse{StatusCode: 404, Body: api.Problem{Status: 404, Code: "OPERATION_NOT_FOUND"}}, nil
	}
	answer := op
	if op.State == api.OperationRunning {
		answer.Result, answer.Problem = nil, nil
		if op.State = api.OperationSucceeded; op.Problem != nil {
			op.State = api.OperationFailed
		}
		s.operations[r.OperationID] = op
	}
	return api.GetOperation200JSONResponse(answer), nil
}

func (s *strict) CreateWorkspace(_ context.Context, r api.CreateWorkspaceRequestObject) (api.CreateWorkspaceResponseObject, error) {
	s.note(*r.Body)
	ws := workspaceNamed(r.Body.Name)
	s.mu.Lock()
	s.workspaces = append(s.workspaces, ws)
	s.mu.Unlock()
	if s.slow {
		return api.CreateWorkspace202JSONResponse{AcceptedJSONResponse: api.AcceptedJSONResponse(s.operation(ws))}, nil
	}
	return api.CreateWorkspace201JSONResponse(ws), nil
}

func (s *strict) ListWorkspaces(_ context.Context, r api.ListWorkspacesRequestObject) (api.ListWorkspacesResponseObject, error) {
	s.note(r.Params)
	s.mu.Lock()
	defer s.mu.Unlock()
	const size = 3 // whatever the request asks for
	start, _ := strconv.Atoi(r.Params.Cursor)
	end := min(start+size, len(s.workspaces))
	out := api.ListWorkspaces200JSONResponse{Items: s.workspaces[start:end]}
	if end < len(s.workspaces) {
		out.NextCursor = strconv.Itoa(end)
	}
	return out, nil
}

func (s *strict) DeleteWorkspace(_ context.Context, r api.DeleteWorkspaceRequestObject) (api.DeleteWorkspaceResponseObject, error) {
	ws := workspaceNamed("gone")
	ws.ID, ws.State = r.WorkspaceID, api.WorkspaceTerminated
	return api.DeleteWorkspace200JSONResponse(ws), nil
}

func (s *strict) ForkCheckpoint(_ context.Context, r api.ForkCheckpointRequestObject) (api.ForkCheckpointResponseObject, error) {
	s.note(*r.Body)
	out := api.ForkResult{CheckpointID: r.CheckpointID, OperationID: string(core.NewID[core.OperationID]()), Timings: api.Timings{}}
	for i := range *r.Body.Count {
		child := api.ForkChild{Timings: api.Timings{}}
		if i == 0 {
			child.Problem = &api.Failure{Code: "RESEAL_FAILED", Message: "step entropy failed"}
		} else {
			ws := workspaceNamed(fmt.Sprintf("%s-%d", r.Body.BranchName, i+1))
			child.Workspace = &ws
		}
		out.Children = append(out.Children, child)
	}
	return api.ForkCheckpoint201JSONResponse(out), nil
}

func (s *strict) GetCheckpoint(_ context.Context, r api.GetCheckpointRequestObject) (api.GetCheckpointResponseObject, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	cp, ok := s.checkpoints[r.CheckpointID]
	if !ok {
		return api.GetCheckpointdefaultApplicationProblemPlusJSONResponse{StatusCode: 404, Body: api.Problem{
			Status: 404, Code: "CHECKPOINT_NOT_FOUND", Detail: "there is none", RequestID: "req1",
		}}, nil
	}
	return api.GetCheckpoint200JSONResponse(cp), nil
}

func (s *strict) PatchCheckpoint(_ context.Context, r api.PatchCheckpointRequestObject) (api.PatchCheckpointResponseObject, error) {
	s.note(*r.Body)
	s.mu.Lock()
	defer s.mu.Unlock()
	cp := s.checkpoints[r.CheckpointID]
	if s.conflicts > 0 {
		s.conflicts--
		cp.Version++
		s.checkpoints[r.CheckpointID] = cp
	}
	if r.Body.Version != cp.Version {
		return api.PatchCheckpointdefaultApplicationProblemPlusJSONResponse{StatusCode: 409, Body: api.Problem{
			Status: 409, Code: "VERSION_CONFLICT", CurrentVersion: cp.Version,
		}}, nil
	}
	cp.Version++
	cp.Annotations = r.Body.Annotations
	s.checkpoints[r.CheckpointID] = cp
	return api.PatchCheckpoint200JSONResponse(cp), nil
}

func TestCreateWaitsForTheOperation(t *testing.T) {
	t.Parallel()
	for _, slow := range []bool{false, true} {
		s, c := newStrict(t)
		s.slow = slow
		req := coppice.CreateWorkspaceRequest{Name: "one", Env: coppice.Env{"A": "b"}, Resources: coppice.ResourcesRequest{VCPUs: new(2)}, TTLSeconds: 60}
		ws, err := c.CreateWorkspace(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if ws.Name != "one" || ws.State != coppice.WorkspaceReady || ws.Network.IP != "10.83.1.2" || !ws.ExpiresAt.IsZero() {
			t.Errorf("slow %v: got %+v", slow, ws)
		}
		got := s.seen[0].(api.CreateWorkspaceRequest)
		if diff := cmp.Diff(api.CreateWorkspaceRequest{Name: "one", Env: api.Env{"A": "b"}, Resources: api.ResourcesRequest{VCPUs: new(2)}, TTLSeconds: 60}, got); diff != "" {
			t.Errorf("request (-want +got):\n%s", diff)
		}
	}
}

// TestWaitCutShort: a caller that stops waiting learns which operation goes on.
func TestWaitCutShort(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			cancel()
			<-r.Context().Done()
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusAccepted)
		_ = json.NewEncoder(w).Encode(api.Operation{ID: "op_x", State: api.OperationRunning})
	}))
	if _, err := c.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{}); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "op_x") {
		t.Errorf("got %v, want one that names the operation", err)
	}
}

func TestFailedOperationIsAnError(t *testing.T) {
	t.Parallel()
	s, c := newStrict(t)
	s.slow, s.problem = true, &api.Failure{Code: "CAPACITY", Message: "no runner has room"}
	_, err := c.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Name: "one"})
	var e *coppice.Error
	if !errors.As(err, &e) || !errors.Is(err, coppice.CodeCapacity) || e.OperationID == "" || e.Detail != "no runner has room" {
		t.Errorf("got %#v", err)
	}
}

func TestIterators(t *testing.T) {
	t.Parallel()
	s, c := newStrict(t)
	for i := range 7 {
		s.workspaces = append(s.workspaces, workspaceNamed(fmt.Sprint("w", i)))
	}
	all, err := coppice.Collect(c.Workspaces(t.Context(), coppice.WorkspaceFilter{
		Labels: []string{"a=b", "c"}, States: []coppice.WorkspaceState{coppice.WorkspaceReady, coppice.WorkspaceLost}, IDSuffix: "abcd",
	}))
	if err != nil || len(all) != 7 || all[6].Name != "w6" {
		t.Errorf("got %d workspaces, %v", len(all), err)
	}
	first := s.seen[0].(api.ListWorkspacesParams)
	if diff := cmp.Diff([]string{"a=b", "c"}, first.Label); diff != "" || len(first.State) != 2 || first.IDSuffix != "abcd" {
		t.Errorf("filter as received: %+v", first)
	}
	before := len(s.seen)
	for _, err := range c.Workspaces(t.Context(), coppice.WorkspaceFilter{}) {
		if err != nil {
			t.Error(err)
		}
		break
	}
	if pages := len(s.seen) - before; pages != 1 {
		t.Errorf("%d pages were read for one item", pages)
	}
}

func TestForkReportsEachChild(t *testing.T) {
	t.Parallel()
	_, c := newStrict(t)
	id := string(core.NewID[core.CheckpointID]())
	res, err := c.ForkCheckpoint(t.Context(), id, coppice.ForkCheckpointRequest{Count: new(3), BranchName: "b"})
	if err != nil || len(res.Children) != 3 || res.CheckpointID != id {
		t.Fatalf("got %+v, %v", res, err)
	}
	if err := res.Children[0].Problem.Err(); !errors.Is(err, coppice.CodeResealFailed) {
		t.Errorf("first child: %v", err)
	}
	if res.Children[2].Problem.Err() != nil || res.Children[2].Workspace.Name != "b-3" {
		t.Errorf("third child: %+v", res.Children[2])
	}
}

func TestAnnotateRepeatsAfterConflicts(t *testing.T) {
	t.Parallel()
	s, c := newStrict(t)
	id := string(core.NewID[core.CheckpointID]())
	s.checkpoints[id] = api.Checkpoint{ID: id, Version: 1, Annotations: api.Annotations{"visits": 1}}
	s.conflicts = 3
	calls := 0
	cp, err := c.Annotate(t.Context(), id, func(cp coppice.Checkpoint) (coppice.Annotations, error) {
		calls++
		return coppice.Annotations{"visits": cp.Annotations["visits"].(float64) + 1}, nil
	})
	if err != nil || calls != 4 || cp.Annotations["visits"] != float64(2) || cp.Version != 5 {
		t.Errorf("after %d calls: %+v, %v", calls, cp, err)
	}
	_, err = c.PatchCheckpoint(t.Context(), id, coppice.PatchCheckpointRequest{Version: 1})
	var e *coppice.Error
	if !errors.As(err, &e) || e.Code != coppice.CodeVersionConflict || e.CurrentVersion != 5 {
		t.Errorf("got %#v", err)
	}
	boom := errors.New("boom")
	if _, err := c.Annotate(t.Context(), id, func(coppice.Checkpoint) (coppice.Annotations, error) { return nil, boom }); !errors.Is(err, boom) {
		t.Errorf("got %v", err)
	}
}

func TestProblems(t *testing.T) {
	t.Parallel()
	_, c := newStrict(t)
	_, err := c.Checkpoint(t.Context(), string(core.NewID[core.CheckpointID]()))
	var e *coppice.Error
	if !errors.As(err, &e) || e.Status != 404 || e.RequestID != "req1" || err.Error() != "there is none (CHECKPOINT_NOT_FOUND)" {
		t.Errorf("got %#v", err)
	}
	if !errors.Is(err, coppice.CodeCheckpointNotFound) || errors.Is(err, coppice.CodeCapacity) {
		t.Error("errors.Is does not tell codes apart")
	}
	if _, err := c.TerminateWorkspace(t.Context(), "ws_x"); err != nil {
		t.Error(err)
	}
	// A proxy between client and server that does not speak the contract.
	odd := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "<html>teapot", http.StatusTeapot) }))
	if _, err := odd.Workspace(t.Context(), "ws_x"); !errors.Is(err, coppice.Code("HTTP_418")) {
		t.Errorf("got %v", err)
	}
	garbled := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"id": 3`) }))
	if _, err := garbled.Workspace(t.Context(), "ws_x"); err == nil {
		t.Error("a garbled answer was taken")
	}
}

func TestRetriesOnlyWhatIsSafe(t *testing.T) {
	t.Parallel()
	var calls atomic.Int32
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if calls.Add(1) < 3 {
			problem(w, api.Problem{Status: 503, Code: "DATABASE_UNAVAILABLE"})
			return
		}
		if r.Method == http.MethodGet {
			_ = json.NewEncoder(w).Encode(api.Workspace{ID: "ws_x"})
		}
	}))
	for _, x := range []struct {
		what string
		call func() error
		want int32
		fail bool
	}{
		{"GET", func() error { _, err := c.Workspace(t.Context(), "ws_x"); return err }, 3, false},
		{"DELETE", func() error { return c.DeleteCheckpoint(t.Context(), "ckpt_x") }, 3, false},
		{"POST", func() error { return c.SignalSession(t.Context(), "sess_x", "TERM") }, 1, true},
		{"PATCH", func() error {
			_, err := c.PatchCheckpoint(t.Context(), "ckpt_x", coppice.PatchCheckpointRequest{})
			return err
		}, 1, true},
		{"readiness", func() error { _, err := c.Ready(t.Context()); return err }, 1, true},
	} {
		calls.Store(0)
		if err := x.call(); (err != nil) != x.fail || calls.Load() != x.want {
			t.Errorf("%s: %d calls, want %d; %v", x.what, calls.Load(), x.want, err)
		}
	}
}

func TestConnectionLostBeforeTheAnswer(t *testing.T) {
	t.Parallel()
	var calls atomic.Int32
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if calls.Add(1) == 1 {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_ = conn.Close()
			}
			return
		}
		_ = json.NewEncoder(w).Encode(api.Workspace{ID: "ws_x"})
	}))
	if _, err := c.Workspace(t.Context(), "ws_x"); err != nil || calls.Load() != 2 {
		t.Errorf("GET: %d calls, %v", calls.Load(), err)
	}
	calls.Store(0)
	if err := c.SignalSession(t.Context(), "sess_x", "TERM"); err == nil || calls.Load() != 1 {
		t.Errorf("POST: %d calls, %v", calls.Load(), err)
	}
}

func TestRetryEndsWithTheContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(t.Context())
	boom := errors.New("boom")
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "3600")
		problem(w, api.Problem{Status: 503, Code: "NO_RUNNER"})
		cancel(boom)
	}))
	if _, err := c.Workspace(ctx, "ws_x"); err == nil {
		t.Error("it succeeded")
	}
}

func TestServers(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(w).Encode(api.Health{Status: api.HealthOK, Version: r.URL.Path})
	})}}
	srv.Start()
	t.Cleanup(srv.Close)
	h, err := client(t, "unix://"+path).Ready(t.Context())
	if err != nil || h.Version != "/readyz" {
		t.Errorf("unix: %+v, %v", h, err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/below/it/readyz", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(api.Health{Status: api.HealthOK})
	})
	below := httptest.NewServer(mux)
	t.Cleanup(below.Close)
	if _, err := client(t, below.URL+"/below/it/").Ready(t.Context()); err != nil {
		t.Errorf("with a path: %v", err)
	}
	for _, bad := range []string{"", "localhost:7070", "ftp://x", "unix://relative", "http://", "http://[::1"} {
		if _, err := coppice.New(coppice.Config{Server: bad}); err == nil {
			t.Errorf("server %q was taken", bad)
		}
	}
	gone := client(t, "unix://"+filepath.Join(t.TempDir(), "gone"))
	if _, err := gone.Workspace(t.Context(), "ws_x"); err == nil {
		t.Error("a server that is not there answered")
	}
}

func TestNamesAreEscaped(t *testing.T) {
	t.Parallel()
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		problem(w, api.Problem{Status: 404, Code: "ROUTE_NOT_FOUND", Detail: r.RequestURI})
	}))
	_, err := c.Workspace(t.Context(), "../a/b?c#d%")
	var e *coppice.Error
	if !errors.As(err, &e) || e.Detail != "/v1/workspaces/..%2Fa%2Fb%3Fc%23d%25" {
		t.Errorf("got %v", err)
	}
}
