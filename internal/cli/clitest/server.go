// Package clitest runs command lines in tests, against a server with a few objects in memory.
package clitest

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/creack/pty"
	"github.com/labstack/echo/v4"
	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/internal/cli"
)

// Server is a test server with the routes of the API contract and a few objects in memory. Programs really run, on this
// machine. The end-to-end tests use the real server; this one can make any state.
type Server struct {
	api.StrictServerInterface
	t *testing.T

	// A test sets these before it runs a command, and reads the requests afterwards.
	Workspaces  []api.Workspace
	Checkpoints []api.Checkpoint
	FailChild   bool  // the first child of a fork fails, and the store has problems
	Requests    []any // bodies and parameters, in the order in which they came

	mu       sync.Mutex // guards the above while commands run, and the programs
	ports    []api.Port
	programs map[string]*program
	server   *httptest.Server
}

// URL is the address of the server.
func (f *Server) URL() string { return f.server.URL }

type program struct {
	session        api.Session
	stdout, stderr strings.Builder
	stdin          io.WriteCloser
	terminal       *os.File
	cmd            *exec.Cmd
	ended          chan struct{}
}

// ID makes an id of a fixed form, so that output can be compared.
func ID(prefix string, n int) string { return fmt.Sprintf("%s_%026d", prefix, n) }

// NewServer starts a server and returns a function that runs a command line of the given commands against it.
func NewServer(t *testing.T, commands ...func(*cli.App) *cobra.Command) (*Server, func(args ...string) (status int, stdout, stderr string)) {
	t.Helper()
	f := &Server{t: t, programs: map[string]*program{}}
	e := echo.New()
	api.RegisterHandlers(e, api.NewStrictHandler(f, nil))
	e.GET("/v1/sessions/:session_id/output", echo.WrapHandler(http.HandlerFunc(f.output)))
	e.POST("/v1/sessions/:session_id/stdin", echo.WrapHandler(http.HandlerFunc(f.stdin)))
	e.GET("/v1/attach/:session_id", echo.WrapHandler(http.HandlerFunc(f.attach)))
	e.GET("/v1/workspaces/:workspace_id/console", func(c echo.Context) error { return c.String(200, "booting\x1b[2J\r\nready\r\n") })
	f.addFiles(e)
	f.server = httptest.NewServer(e)
	t.Cleanup(f.server.Close)
	return f, func(args ...string) (int, string, string) {
		a, stdout, stderr := App(map[string]string{"COPPICE_SERVER": f.URL(), "COPPICE_TOKEN": "k"})
		status := a.Run(t.Context(), args, commands...)
		return status, stdout.String(), stderr.String()
	}
}

// Dawn is when everything in the server was made.
var Dawn = time.Date(2026, 11, 21, 6, 0, 0, 0, time.UTC)

// Workspace is the workspace with the number n.
func Workspace(n int, name string, state api.WorkspaceState) api.Workspace {
	return api.Workspace{
		ID: ID("ws", n), Name: name, State: state, Epoch: 1, Version: 1, Image: api.ImageRef{Name: "base", Digest: "sha256:" + strings.Repeat("ab", 32)},
		Resources:    api.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1},
		Network:      api.Network{EgressPolicy: api.EgressDenyAll, IP: fmt.Sprintf("10.83.1.%d", n), MAC: "02:00:00:00:00:01", Hostname: name, MachineID: strings.Repeat("c", 32)},
		Labels:       api.Labels{"team": "blue"},
		CheckpointID: ID("ckpt", 1), ParentCheckpointID: ID("ckpt", 1), RunnerID: ID("rnr", 1),
		Timings: api.Timings{{Stage: "restore", DurationMS: 12.5}, {Stage: "reseal", DurationMS: 140}}, CreatedAt: Dawn, ReadyAt: Dawn.Add(420 * time.Millisecond),
	}
}

// Checkpoint is the checkpoint with the number n, whose parent is the one with the number parent; 0 makes it a template.
func Checkpoint(n int, parent int, annotations api.Annotations) api.Checkpoint {
	c := api.Checkpoint{
		ID: ID("ckpt", n), State: api.CheckpointCaptured, Kind: api.CheckpointKindUser, WorkspaceID: ID("ws", 1), Version: 3,
		Image: api.ImageRef{Name: "base", Digest: "sha256:" + strings.Repeat("ab", 32)}, Resources: api.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1},
		Labels: api.Labels{}, Annotations: annotations, DeltaBytes: 3 << 20, DeviceStateBytes: 51200, DiskBytes: 12 << 20, PauseMS: 21.25,
		Timings: api.Timings{{Stage: "pause", DurationMS: 21.25}}, CreatedAt: Dawn.Add(time.Duration(n) * time.Minute),
	}
	if parent > 0 {
		c.ParentID = ID("ckpt", parent)
	} else {
		c.Kind, c.WorkspaceID, c.PauseMS = api.CheckpointKindTemplate, "", 0
	}
	return c
}

func (f *Server) note(r any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.Requests = append(f.Requests, r)
}

func refusal(status int, code string) api.Problem {
	return api.Problem{Type: "x", Title: "x", Status: status, Code: code, Detail: "no such thing", RequestID: "r1"}
}

func (f *Server) ListWorkspaces(_ context.Context, r api.ListWorkspacesRequestObject) (api.ListWorkspacesResponseObject, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := api.ListWorkspaces200JSONResponse{Items: []api.Workspace{}}
	for _, ws := range f.Workspaces {
		if (r.Params.Name == "" || ws.Name == r.Params.Name) && strings.HasSuffix(ws.ID, r.Params.IDSuffix) && (len(r.Params.State) > 0 || ws.State != api.WorkspaceTerminated) {
			out.Items = append(out.Items, ws)
		}
	}
	return out, nil
}

func (f *Server) GetWorkspace(_ context.Context, r api.GetWorkspaceRequestObject) (api.GetWorkspaceResponseObject, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, ws := range f.Workspaces {
		if ws.ID == r.WorkspaceID {
			return api.GetWorkspace200JSONResponse(ws), nil
		}
	}
	return api.GetWorkspacedefaultApplicationProblemPlusJSONResponse{StatusCode: 404, Body: refusal(404, "WORKSPACE_NOT_FOUND")}, nil
}

func (f *Server) CreateWorkspace(_ context.Context, r api.CreateWorkspaceRequestObject) (api.CreateWorkspaceResponseObject, error) {
	f.note(*r.Body)
	return api.CreateWorkspace201JSONResponse(Workspace(9, "made", api.WorkspaceReady)), nil
}

func (f *Server) DeleteWorkspace(_ context.Context, r api.DeleteWorkspaceRequestObject) (api.DeleteWorkspaceResponseObject, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.Workspaces, func(ws api.Workspace) bool { return ws.ID == r.WorkspaceID })
	f.Workspaces[i].State = api.WorkspaceTerminated
	return api.DeleteWorkspace200JSONResponse(f.Workspaces[i]), nil
}

func (f *Server) ListCheckpoints(_ context.Context, r api.ListCheckpointsRequestObject) (api.ListCheckpointsResponseObject, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := api.ListCheckpoints200JSONResponse{Items: []api.Checkpoint{}}
	for _, c := range f.Checkpoints {
		if (r.Params.Name == "" || c.Name == r.Params.Name) && strings.HasSuffix(c.ID, r.Params.IDSuffix) && (r.Params.Kind == "" || c.Kind == r.Params.Kind) {
			out.Items = append(out.Items, c)
		}
	}
	return out, nil
}

func (f *Server) GetCheckpoint(_ context.Context, r api.GetCheckpointRequestObject) (api.GetCheckpointResponseObject, error) {
	for _, c := range f.Checkpoints {
		if c.ID == r.CheckpointID {
			return api.GetCheckpoint200JSONResponse(c), nil
		}
	}
	return api.GetCheckpointdefaultApplicationProblemPlusJSONResponse{StatusCode: 404, Body: refusal(404, "CHECKPOINT_NOT_FOUND")}, nil
}

func (f *Server) CreateCheckpoint(_ context.Context, r api.CreateCheckpointRequestObject) (api.CreateCheckpointResponseObject, error) {
	f.note(*r.Body)
	return api.CreateCheckpoint201JSONResponse(Checkpoint(8, 1, r.Body.Annotations)), nil
}

func (f *Server) PatchCheckpoint(_ context.Context, r api.PatchCheckpointRequestObject) (api.PatchCheckpointResponseObject, error) {
	f.note(*r.Body)
	cp := Checkpoint(1, 0, r.Body.Annotations)
	if r.Body.Name != nil {
		cp.Name = *r.Body.Name
	}
	cp.Labels = changed(cp.Labels, r.Body.Labels)
	return api.PatchCheckpoint200JSONResponse(cp), nil
}

func (f *Server) GetLineage(_ context.Context, r api.GetLineageRequestObject) (api.GetLineageResponseObject, error) {
	out := api.GetLineage200JSONResponse{}
	for id := r.CheckpointID; id != ""; {
		for _, c := range f.Checkpoints {
			if c.ID == id {
				out.Items = append(out.Items, api.Ancestor{ID: c.ID, ParentID: c.ParentID, State: c.State, Kind: c.Kind, Annotations: json.RawMessage("{}"), CreatedAt: c.CreatedAt})
				id = c.ParentID
				break
			}
		}
	}
	return out, nil
}

func (f *Server) GetTree(_ context.Context, r api.GetTreeRequestObject) (api.GetTreeResponseObject, error) {
	return api.GetTree200JSONResponse{RootID: r.CheckpointID, Items: f.Tree(r.CheckpointID)}, nil
}

// DiffCheckpoints answers in two pages, with a name that no terminal should see.
func (f *Server) DiffCheckpoints(_ context.Context, r api.DiffCheckpointsRequestObject) (api.DiffCheckpointsResponseObject, error) {
	memory := int64(5 << 20)
	if r.Params.Cursor == "" {
		return api.DiffCheckpoints200JSONResponse{
			FromID: r.CheckpointID, ToID: r.Params.To, FilesComplete: true, NextCursor: "more", MemoryChangedBytes: &memory,
			Items: []api.FileChange{{Path: "/etc/passwd", Change: api.FileChanged, Type: api.ChangedFile, What: []api.FileChangeWhat{api.FileContent, api.FileMTime}}},
			Processes: &api.ProcessChanges{
				Complete: true, Started: []api.WorkloadProcess{{PID: 12, Command: "sleep", Args: "sleep 100"}}, Gone: []api.WorkloadProcess{{PID: 7, Command: "kworker"}},
			},
		}, nil
	}
	return api.DiffCheckpoints200JSONResponse{
		FromID: r.CheckpointID, ToID: r.Params.To, FilesComplete: true, Unreadable: 1,
		Items: []api.FileChange{
			{Path: "/evil\x1b[2J", Change: api.FileAdded, Type: api.ChangedFile},
			{Path: "/\uFFFD", PathBase64: base64.StdEncoding.EncodeToString([]byte("/\xff")), Change: api.FileRemoved, Type: api.ChangedFile},
		},
	}, nil
}

// Tree is the tree below a checkpoint.
func (f *Server) Tree(root string) []api.TreeNode {
	out := []api.TreeNode{}
	for _, c := range f.Checkpoints {
		if c.ID == root || slices.ContainsFunc(out, func(n api.TreeNode) bool { return n.Checkpoint.ID == c.ParentID }) {
			n := api.TreeNode{Checkpoint: c, Workspaces: []api.TreeWorkspace{}}
			for _, ws := range f.Workspaces {
				if ws.CheckpointID == c.ID && ws.State != api.WorkspaceTerminated {
					n.Workspaces = append(n.Workspaces, api.TreeWorkspace{ID: ws.ID, Name: ws.Name, State: ws.State, CreatedAt: ws.CreatedAt})
				}
			}
			out = append(out, n)
		}
	}
	return out
}

// Fork is the answer to a request for forks.
func (f *Server) Fork(from string, count int, name string) api.ForkResult {
	res := api.ForkResult{OperationID: ID("op", 1), CheckpointID: from, Timings: api.Timings{}}
	for i := range count {
		if f.FailChild && i == 0 {
			res.Children = append(res.Children, api.ForkChild{Timings: api.Timings{}, Problem: &api.Failure{Code: "RESEAL_FAILED", Message: "step entropy failed"}})
			continue
		}
		ws := Workspace(20+i, fmt.Sprintf("%s-%d", name, i+1), api.WorkspaceReady)
		res.Children = append(res.Children, api.ForkChild{Workspace: &ws, Timings: ws.Timings})
	}
	return res
}

func (f *Server) ForkCheckpoint(_ context.Context, r api.ForkCheckpointRequestObject) (api.ForkCheckpointResponseObject, error) {
	f.note(*r.Body)
	return api.ForkCheckpoint201JSONResponse(f.Fork(r.CheckpointID, *r.Body.Count, r.Body.BranchName)), nil
}

func (f *Server) ForkWorkspace(_ context.Context, r api.ForkWorkspaceRequestObject) (api.ForkWorkspaceResponseObject, error) {
	f.note(*r.Body)
	return api.ForkWorkspace201JSONResponse(f.Fork(ID("ckpt", 7), *r.Body.Count, r.Body.BranchName)), nil
}

func (f *Server) RestoreWorkspace(_ context.Context, r api.RestoreWorkspaceRequestObject) (api.RestoreWorkspaceResponseObject, error) {
	f.note(*r.Body)
	ws := f.Workspaces[0]
	ws.Epoch++
	return api.RestoreWorkspace200JSONResponse{OperationID: ID("op", 1), Workspace: ws, Timings: api.Timings{}}, nil
}

func (f *Server) RestoreCheckpoint(_ context.Context, r api.RestoreCheckpointRequestObject) (api.RestoreCheckpointResponseObject, error) {
	f.note(*r.Body)
	return api.RestoreCheckpoint201JSONResponse{OperationID: ID("op", 1), Workspace: Workspace(30, r.Body.WorkspaceName, api.WorkspaceReady), Timings: api.Timings{}}, nil
}

// ClosedPort is a port that nobody in any workspace listens on.
const ClosedPort = 9999

func (f *Server) ListPorts(context.Context, api.ListPortsRequestObject) (api.ListPortsResponseObject, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return api.ListPorts200JSONResponse{Items: append([]api.Port{}, f.ports...)}, nil
}

func (f *Server) CreatePort(_ context.Context, r api.CreatePortRequestObject) (api.CreatePortResponseObject, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := api.Port{ID: ID("port", len(f.ports)+1), WorkspaceID: r.WorkspaceID, GuestPort: r.Body.GuestPort, Listen: r.Body.Listen, CreatedAt: Dawn}
	if strings.HasPrefix(p.Listen, ":") {
		p.Listen = "127.0.0.1" + p.Listen
	}
	f.ports = append(f.ports, p)
	if p.GuestPort == ClosedPort {
		p.Problem = &api.Failure{Code: "PORT_CLOSED", Message: "no program in the workspace listens on the port yet"}
	}
	return api.CreatePort201JSONResponse(p), nil
}

func (f *Server) DeletePort(_ context.Context, r api.DeletePortRequestObject) (api.DeletePortResponseObject, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ports = slices.DeleteFunc(f.ports, func(p api.Port) bool { return p.ID == r.PortID })
	return api.DeletePort204Response{}, nil
}

func (f *Server) GetOperation(_ context.Context, r api.GetOperationRequestObject) (api.GetOperationResponseObject, error) {
	return api.GetOperation200JSONResponse{
		ID: r.OperationID, Kind: api.OperationForkCheckpoint, State: api.OperationFailed, Step: "grow", CheckpointID: ID("ckpt", 1),
		WorkspaceIDs: []string{ID("ws", 1)}, Timings: api.Timings{}, Problem: &api.Failure{Code: "CAPACITY", Message: "no runner has room"}, CreatedAt: Dawn,
	}, nil
}

// -- programs --------------------------------------------------------------------------------------------------------

func (f *Server) Exec(_ context.Context, r api.ExecRequestObject) (api.ExecResponseObject, error) {
	f.note(*r.Body)
	p := &program{ended: make(chan struct{})}
	f.mu.Lock()
	p.session = api.Session{
		ID: ID("sess", len(f.programs)+1), WorkspaceID: r.WorkspaceID, Epoch: 1, Command: r.Body.Command, Cwd: "/", State: api.SessionRunning,
		PTY: r.Body.PTY, PID: 42, StartedAt: Dawn,
	}
	f.programs[p.session.ID] = p
	f.mu.Unlock()
	p.cmd = exec.Command(r.Body.Command[0], r.Body.Command[1:]...)
	p.cmd.Env = os.Environ()
	for k, v := range r.Body.Env {
		p.cmd.Env = append(p.cmd.Env, k+"="+v)
	}
	var err error
	if r.Body.PTY {
		p.terminal, err = pty.StartWithSize(p.cmd, &pty.Winsize{Cols: uint16(r.Body.Cols), Rows: uint16(r.Body.Rows)})
	} else {
		p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
		if r.Body.StdinOpen {
			p.stdin, err = p.cmd.StdinPipe()
		}
		if err == nil {
			err = p.cmd.Start()
		}
	}
	if err != nil {
		f.mu.Lock()
		delete(f.programs, p.session.ID)
		f.mu.Unlock()
		return api.ExecdefaultApplicationProblemPlusJSONResponse{StatusCode: 400, Body: refusal(400, "COMMAND_NOT_FOUND")}, nil //nolint:nilerr // it is the answer
	}
	begun := p.session // reap writes to it
	if !r.Body.PTY {
		go f.reap(p)
	}
	if !*r.Body.Wait {
		return api.Exec201JSONResponse(begun), nil
	}
	<-p.ended
	return api.Exec200JSONResponse{Session: p.session, ExitCode: *p.session.ExitCode, Stdout: p.stdout.String(), Stderr: p.stderr.String(), Encoding: api.EncodingUTF8, Timings: api.Timings{}}, nil
}

func (f *Server) reap(p *program) {
	_ = p.cmd.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	code := p.cmd.ProcessState.ExitCode()
	if code < 0 {
		code = 130
	}
	p.session.State, p.session.ExitCode, p.session.EndedAt = api.SessionExited, &code, Dawn
	p.session.StdoutBytes, p.session.StderrBytes = int64(p.stdout.Len()), int64(p.stderr.Len())
	close(p.ended)
}

func (f *Server) find(id string) *program {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.programs[id]
}

func (f *Server) GetSession(_ context.Context, r api.GetSessionRequestObject) (api.GetSessionResponseObject, error) {
	p := f.find(r.SessionID)
	if r.Params.Wait > 0 {
		<-p.ended
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return api.GetSession200JSONResponse(p.session), nil
}

func (f *Server) ListSessions(context.Context, api.ListSessionsRequestObject) (api.ListSessionsResponseObject, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := api.ListSessions200JSONResponse{Items: []api.Session{}}
	for i := len(f.programs); i > 0; i-- {
		out.Items = append(out.Items, f.programs[ID("sess", i)].session)
	}
	return out, nil
}

func (f *Server) SignalSession(_ context.Context, r api.SignalSessionRequestObject) (api.SignalSessionResponseObject, error) {
	f.note(*r.Body)
	_ = f.find(r.SessionID).cmd.Process.Signal(os.Interrupt)
	return api.SignalSession204Response{}, nil
}

func (f *Server) AttachSession(_ context.Context, r api.AttachSessionRequestObject) (api.AttachSessionResponseObject, error) {
	return api.AttachSession201JSONResponse{Transport: api.TransportWebsocket, URL: "/v1/attach/" + r.SessionID + "?token=once", ExpiresAt: Dawn}, nil
}

// output serves what a program wrote once it has ended.
func (f *Server) output(w http.ResponseWriter, r *http.Request) {
	p := f.find(strings.Split(r.URL.Path, "/")[3])
	if r.URL.Query().Get("follow") == "true" {
		<-p.ended
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	w.Header().Set("Coppice-Offset", "0")
	w.Header().Set("Trailer", "Coppice-Eof")
	text := p.stdout.String()
	if r.URL.Query().Get("stream") == "stderr" {
		text = p.stderr.String()
	}
	_, _ = io.WriteString(w, text)
	w.Header().Set("Coppice-Eof", "true")
}

func (f *Server) stdin(w http.ResponseWriter, r *http.Request) {
	p := f.find(strings.Split(r.URL.Path, "/")[3])
	_, _ = io.Copy(p.stdin, r.Body)
	if r.URL.Query().Get("close") == "true" {
		_ = p.stdin.Close()
	}
	w.WriteHeader(http.StatusNoContent)
}

// attach connects a WebSocket to a program's terminal. "drop me" on its input cuts the connection.
func (f *Server) attach(w http.ResponseWriter, r *http.Request) {
	p := f.find(strings.Split(r.URL.Path, "/")[3])
	conn, err := websocket.Accept(w, r, nil)
	if err != nil {
		f.t.Error(err)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	go func() {
		for {
			kind, data, err := conn.Read(ctx)
			if err != nil {
				return
			}
			var m api.AttachMessage
			switch {
			case kind == websocket.MessageBinary && strings.Contains(string(data), "\x1c"):
				_ = conn.CloseNow()
				return
			case kind == websocket.MessageBinary:
				_, _ = p.terminal.Write(data)
			case json.Unmarshal(data, &m) == nil && m.Type == api.AttachResize:
				_ = pty.Setsize(p.terminal, &pty.Winsize{Cols: uint16(m.Cols), Rows: uint16(m.Rows)})
			}
		}
	}()
	f.copyTerminal(ctx, conn, p)
}

func (f *Server) copyTerminal(ctx context.Context, conn *websocket.Conn, p *program) {
	buf := make([]byte, 4096)
	for {
		n, err := p.terminal.Read(buf)
		if n > 0 {
			f.mu.Lock()
			offset := p.session.StdoutBytes
			p.session.StdoutBytes += int64(n)
			f.mu.Unlock()
			head := append([]byte{1}, binary.BigEndian.AppendUint64(nil, uint64(offset))...)
			if conn.Write(ctx, websocket.MessageBinary, append(head, buf[:n]...)) != nil {
				return
			}
		}
		if err != nil {
			break
		}
	}
	_ = p.cmd.Wait()
	_ = conn.Write(ctx, websocket.MessageText, fmt.Appendf(nil, `{"type":"exit","session":{"exit_code":%d,"timed_out":false}}`, p.cmd.ProcessState.ExitCode()))
	_ = conn.Close(websocket.StatusNormalClosure, "")
}

// StepWorkspace runs no program: the command is a shell line that is known here.
func (f *Server) StepWorkspace(_ context.Context, r api.StepWorkspaceRequestObject) (api.StepWorkspaceResponseObject, error) {
	out := api.StepActionResult{
		OperationID: ID("op", 1), WorkspaceID: r.WorkspaceID, SessionID: ID("sess", 1), Kept: api.KeepNothing, ExitCode: new(0), Stdout: "out\n", Stderr: "err\n",
		Encoding: api.StepUTF8, Timings: api.Timings{},
	}
	switch r.Body.Command[0] {
	case "false":
		out.ExitCode = new(1)
	case "full":
		out.Problem = &api.Failure{Code: "CAPACITY", Message: "no room"}
	default:
		out.Kept, out.CheckpointID = api.KeepCheckpoint, ID("ckpt", 1)
	}
	return api.StepWorkspace200JSONResponse(out), nil
}

// StepCheckpoint answers in lines: the last action first.
func (f *Server) StepCheckpoint(_ context.Context, r api.StepCheckpointRequestObject) (api.StepCheckpointResponseObject, error) {
	f.note(*r.Body)
	var b bytes.Buffer
	lines := json.NewEncoder(&b)
	op := api.StepEvent{OperationID: ID("op", 1)}
	err := lines.Encode(op)
	for i, action := range slices.Backward(r.Body.Actions) {
		e := op
		e.Action = &api.StepActionResult{Index: i, Kept: api.KeepCheckpoint, CheckpointID: ID("ckpt", i+1), ExitCode: new(0), Score: new(0.5), Timings: api.Timings{}}
		if len(action.Command) == 0 {
			e.Action = &api.StepActionResult{Index: i, Kept: api.KeepNothing, Problem: &api.Failure{Code: "CAPACITY", Message: "no room"}, Timings: api.Timings{}}
		}
		err = errors.Join(err, lines.Encode(e))
	}
	op.State = api.OperationSucceeded
	return api.StepCheckpoint200ApplicationXNdjsonResponse{Body: &b}, errors.Join(err, lines.Encode(op))
}
