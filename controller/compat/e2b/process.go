package e2b

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/controller/compat/e2b/envd/process"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// processes serves process.Process on the sessions of a workspace. A process of E2B is a session.
type processes struct{}

var _ process.ProcessHandler = processes{}

const (
	exitKept = 30 * time.Second // how long clients can connect to an ended process
	maxChunk = 32 << 10         // of output in one event
	lastLook = 10 * time.Second // bounds the question whether a sandbox still runs
)

// List returns the processes that run.
func (processes) List(ctx context.Context, _ *connect.Request[process.ListRequest]) (*connect.Response[process.ListResponse], error) {
	v := visitOf(ctx)
	out := &process.ListResponse{}
	for s, err := range v.Sessions(ctx, v.ws) {
		if err != nil {
			return nil, rpcError(ctx, err)
		}
		if s.State == coppice.SessionRunning && len(s.Command) > 0 {
			out.Processes = append(out.Processes, &process.ProcessInfo{
				Pid: pidOf(s), Config: &process.ProcessConfig{Cmd: s.Command[0], Args: s.Command[1:], Cwd: &s.Cwd},
			})
		}
	}
	return connect.NewResponse(out), nil
}

func pidOf(s coppice.Session) uint32 { return uint32(max(s.PID, 0)) } //nolint:gosec // G115: pids are small

// find returns the session of a selected process. Pids are used again, so the newest session counts.
func (v visit) find(ctx context.Context, sel *process.ProcessSelector, ended bool) (coppice.Session, error) {
	pid, ok := sel.GetSelector().(*process.ProcessSelector_Pid)
	if !ok {
		return coppice.Session{}, connect.NewError(connect.CodeUnimplemented, errors.New("a process is selected by its pid; tags are not supported"))
	}
	for s, err := range v.Sessions(ctx, v.ws) {
		if err != nil {
			return s, rpcError(ctx, err)
		}
		if pidOf(s) != pid.Pid {
			continue
		}
		if s.State == coppice.SessionRunning || ended && time.Since(s.EndedAt) < exitKept {
			return s, nil
		}
	}
	return coppice.Session{}, connect.NewError(connect.CodeNotFound, errors.New("process with pid "+strconv.FormatUint(uint64(pid.Pid), 10)+" not found"))
}

// Start starts a process and sends its output until it ends. If the client hangs up, the process goes on; at the deadline of the
// request it is killed.
func (processes) Start(ctx context.Context, req *connect.Request[process.StartRequest], stream *connect.ServerStream[process.StartResponse]) error {
	v := visitOf(ctx)
	u, err := v.account(ctx)
	if err != nil {
		return rpcError(ctx, err)
	}
	m := req.Msg
	config := m.GetProcess()
	exec := coppice.ExecRequest{
		Command: append([]string{config.GetCmd()}, config.GetArgs()...), Cwd: u.resolve(cmp.Or(config.GetCwd(), v.dir)), Env: coppice.Env(config.GetEnvs()), User: u.name,
		StdinOpen: m.Stdin == nil || m.GetStdin(),
	}
	if size := m.GetPty().GetSize(); m.GetPty() != nil {
		exec.PTY, exec.StdinOpen, exec.Cols, exec.Rows = true, true, int(size.GetCols()), int(size.GetRows())
	}
	if deadline, ok := ctx.Deadline(); ok {
		exec.TimeoutMS = max(time.Until(deadline).Milliseconds(), 1)
	}
	s, err := v.StartSession(ctx, v.ws, exec)
	if err != nil {
		return rpcError(ctx, err)
	}
	return v.follow(ctx, s, 0, 0, req.Header(), func(e *process.ProcessEvent) error { return stream.Send(&process.StartResponse{Event: e}) })
}

// Connect sends what a process writes from now on.
func (processes) Connect(ctx context.Context, req *connect.Request[process.ConnectRequest], stream *connect.ServerStream[process.ConnectResponse]) error {
	v := visitOf(ctx)
	s, err := v.find(ctx, req.Msg.GetProcess(), true)
	if err != nil {
		return err
	}
	return v.follow(ctx, s, s.StdoutBytes, s.StderrBytes, req.Header(), func(e *process.ProcessEvent) error { return stream.Send(&process.ConnectResponse{Event: e}) })
}

// follow sends the events of a session: its start, its output, and its end.
func (v visit) follow(ctx context.Context, s coppice.Session, stdout, stderr int64, header http.Header, send func(*process.ProcessEvent) error) error {
	events := &beating[*process.ProcessEvent]{send: send, pulse: func() *process.ProcessEvent {
		return &process.ProcessEvent{Event: &process.ProcessEvent_Keepalive{Keepalive: &process.ProcessEvent_KeepAlive{}}}
	}}
	if err := events.put(&process.ProcessEvent{Event: &process.ProcessEvent_Start{Start: &process.ProcessEvent_StartEvent{Pid: pidOf(s)}}}); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var copies sync.WaitGroup
	still := events.beat(ctx, keepalive(header))
	for name, from := range map[string]int64{coppice.Stdout: stdout, coppice.Stderr: stderr} {
		if s.PTY && name == coppice.Stderr {
			continue
		}
		copies.Go(func() {
			if err := v.Follow(ctx, s.ID, name, from, output{events, name, s.PTY}); err != nil {
				cancel(err)
			}
		})
	}
	copies.Wait()
	still()
	if ctx.Err() != nil {
		return rpcError(ctx, v.streamEnded(ctx, context.Cause(ctx)))
	}
	s, err := v.WaitSession(ctx, s.ID)
	if err != nil {
		return rpcError(ctx, v.streamEnded(ctx, err))
	}
	if _, limited := ctx.Deadline(); s.TimedOut && limited {
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("the process was killed at the deadline of the request"))
	}
	return events.put(&process.ProcessEvent{Event: &process.ProcessEvent_End{End: endOf(s)}})
}

// streamEnded breaks the connection where the sandbox went away during a stream, as E2B's proxy does: clients then ask whether it
// still runs. Otherwise the server is "unavailable".
func (v visit) streamEnded(ctx context.Context, err error) error {
	var refused *coppice.Error
	if !errors.As(err, &refused) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastLook)
	defer cancel()
	if ws, err := v.Workspace(ctx, v.ws); errors.Is(err, coppice.CodeWorkspaceNotFound) || err == nil && !running(ws) {
		panic(http.ErrAbortHandler)
	}
	return connect.NewError(connect.CodeUnavailable, errors.New(refused.Error()))
}

// endOf tells how a process ended, in the words of Go's os package, which clients show.
func endOf(s coppice.Session) *process.ProcessEvent_EndEvent {
	e := &process.ProcessEvent_EndEvent{Exited: s.Signal == ""}
	if s.ExitCode != nil {
		e.ExitCode = int32(*s.ExitCode) //nolint:gosec // G115: exit statuses are small
	}
	e.Status = "exit status " + strconv.Itoa(int(e.GetExitCode()))
	if s.Signal != "" {
		e.ExitCode, e.Status = -1, "signal: "+strings.ToLower(s.Signal)
		if n := unix.SignalNum(s.Signal); n != 0 {
			e.Status = "signal: " + n.String()
		}
	}
	if e.GetExitCode() != 0 {
		e.Error = &e.Status
	}
	return e
}

// output sends what is written to it as output of a process.
type output struct {
	*beating[*process.ProcessEvent]
	stream string
	pty    bool
}

func (o output) Write(p []byte) (int, error) {
	for sent := 0; sent < len(p); {
		chunk := p[sent:min(sent+maxChunk, len(p))]
		d := &process.ProcessEvent_DataEvent{}
		switch {
		case o.pty:
			d.Output = &process.ProcessEvent_DataEvent_Pty{Pty: chunk}
		case o.stream == coppice.Stderr:
			d.Output = &process.ProcessEvent_DataEvent_Stderr{Stderr: chunk}
		default:
			d.Output = &process.ProcessEvent_DataEvent_Stdout{Stdout: chunk}
		}
		if err := o.put(&process.ProcessEvent{Event: &process.ProcessEvent_Data{Data: d}}); err != nil {
			return sent, err
		}
		sent += len(chunk)
	}
	return len(p), nil
}

// Update sets the size of a terminal.
func (processes) Update(ctx context.Context, req *connect.Request[process.UpdateRequest]) (*connect.Response[process.UpdateResponse], error) {
	v := visitOf(ctx)
	s, err := v.find(ctx, req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if size := req.Msg.GetPty().GetSize(); size != nil {
		err = v.ResizeSession(ctx, s.ID, int(size.GetCols()), int(size.GetRows()))
	}
	return connect.NewResponse(&process.UpdateResponse{}), rpcError(ctx, err)
}

// input writes to a process that has an input.
func (v visit) input(ctx context.Context, s coppice.Session, in *process.ProcessInput) error {
	if !s.StdinOpen && !s.PTY {
		return connect.NewError(connect.CodeFailedPrecondition, errors.New("the process has no standard input, or it was closed"))
	}
	data := in.GetStdin()
	if p, ok := in.GetInput().(*process.ProcessInput_Pty); ok {
		data = p.Pty
	}
	return rpcError(ctx, v.WriteStdin(ctx, s.ID, bytes.NewReader(data), false))
}

// SendInput writes to a process.
func (processes) SendInput(ctx context.Context, req *connect.Request[process.SendInputRequest]) (*connect.Response[process.SendInputResponse], error) {
	v := visitOf(ctx)
	s, err := v.find(ctx, req.Msg.GetProcess(), false)
	if err == nil {
		err = v.input(ctx, s, req.Msg.GetInput())
	}
	return connect.NewResponse(&process.SendInputResponse{}), err
}

// StreamInput writes the messages of a stream to a process.
func (processes) StreamInput(ctx context.Context, stream *connect.ClientStream[process.StreamInputRequest]) (*connect.Response[process.StreamInputResponse], error) {
	v := visitOf(ctx)
	var s *coppice.Session
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().(type) {
		case *process.StreamInputRequest_Start:
			found, err := v.find(ctx, e.Start.GetProcess(), false)
			if err != nil {
				return nil, err
			}
			s = &found
		case *process.StreamInputRequest_Data:
			if s == nil {
				return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("the stream must begin with the process"))
			}
			if err := v.input(ctx, *s, e.Data.GetInput()); err != nil {
				return nil, err
			}
		}
	}
	if err := stream.Err(); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return connect.NewResponse(&process.StreamInputResponse{}), nil
}

// SendSignal sends one of the two signals that E2B has.
func (processes) SendSignal(ctx context.Context, req *connect.Request[process.SendSignalRequest]) (*connect.Response[process.SendSignalResponse], error) {
	v := visitOf(ctx)
	var name string
	switch req.Msg.GetSignal() {
	case process.Signal_SIGNAL_SIGKILL:
		name = "SIGKILL"
	case process.Signal_SIGNAL_SIGTERM:
		name = "SIGTERM"
	case process.Signal_SIGNAL_UNSPECIFIED:
		fallthrough
	default:
		return nil, connect.NewError(connect.CodeUnimplemented, errors.New("only SIGTERM and SIGKILL can be sent"))
	}
	s, err := v.find(ctx, req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&process.SendSignalResponse{}), rpcError(ctx, v.SignalSession(ctx, s.ID, name))
}

// CloseStdin closes the input of a process.
func (processes) CloseStdin(ctx context.Context, req *connect.Request[process.CloseStdinRequest]) (*connect.Response[process.CloseStdinResponse], error) {
	v := visitOf(ctx)
	s, err := v.find(ctx, req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&process.CloseStdinResponse{}), rpcError(ctx, v.WriteStdin(ctx, s.ID, nil, true))
}
