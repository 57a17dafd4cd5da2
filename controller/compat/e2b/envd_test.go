package e2b_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/controller/compat/e2b/envd/filesystem"
	"github.com/coppice-dev/coppice/controller/compat/e2b/envd/process"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// in adds what a client sends to the daemon of a sandbox.
type in struct{ s sandbox }

func (i in) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("E2b-Sandbox-Id", i.s.SandboxID)
	r.Header.Set("E2b-Sandbox-Port", "49983")
	r.Header.Set("X-Access-Token", i.s.EnvdAccessToken)
	return http.DefaultTransport.RoundTrip(r)
}

func (w *world) processes(s sandbox, opts ...connect.ClientOption) process.ProcessClient {
	return process.NewProcessClient(&http.Client{Transport: in{s}}, w.url, opts...)
}

func (w *world) files(s sandbox, opts ...connect.ClientOption) filesystem.FilesystemClient {
	return filesystem.NewFilesystemClient(&http.Client{Transport: in{s}}, w.url, opts...)
}

// Both codecs, and what a process writes, arrive; the end has the words of Go's os package.
func TestProcessInBothCodecs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base"}`)
	pid := 41 // of the last program
	for name, opts := range map[string][]connect.ClientOption{"json": {connect.WithProtoJSON()}, "proto": nil, "grpc-web": {connect.WithGRPCWeb()}} {
		stream, err := w.processes(s, opts...).Start(t.Context(), connect.NewRequest(&process.StartRequest{
			Process: &process.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", "fill 100000"}}, Stdin: new(false),
		}))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		size := 0
		for stream.Receive() {
			switch e := stream.Msg().GetEvent().GetEvent().(type) {
			case *process.ProcessEvent_Start:
				got = append(got, fmt.Sprint("start ", e.Start.GetPid()))
			case *process.ProcessEvent_Data:
				if n := len(e.Data.GetStdout()); n > 32<<10 {
					t.Errorf("%s: %d bytes in one event", name, n)
				}
				size += len(e.Data.GetStdout())
			case *process.ProcessEvent_End:
				got = append(got, fmt.Sprintf("end %d %t %s", e.End.GetExitCode(), e.End.GetExited(), e.End.GetStatus()))
			}
		}
		pid++
		if diff := cmp.Diff([]string{fmt.Sprint("start ", pid), "end 0 true exit status 0"}, got); stream.Err() != nil || size != 100_000 || diff != "" {
			t.Errorf("%s: %v, %d bytes (-want +got):\n%s", name, stream.Err(), size, diff)
		}
	}
}

// A process goes on when its client hangs up, and can be found, fed and ended.
func TestProcessOutlivesItsStream(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base"}`)
	p := w.processes(s, connect.WithProtoJSON())
	stream, err := p.Start(t.Context(), connect.NewRequest(&process.StartRequest{Process: &process.ProcessConfig{Cmd: "cat"}}))
	if err != nil || !stream.Receive() {
		t.Fatal(err)
	}
	pid := &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: stream.Msg().GetEvent().GetStart().GetPid()}}
	_ = stream.Close()
	again, err := p.Connect(t.Context(), connect.NewRequest(&process.ConnectRequest{Process: pid}))
	if err != nil || !again.Receive() || again.Msg().GetEvent().GetStart() == nil {
		t.Fatal(err)
	}
	if _, err := p.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: pid, Input: &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: []byte("a")}}})); err != nil {
		t.Error(err)
	}
	input := p.StreamInput(t.Context())
	for _, m := range []*process.StreamInputRequest{
		{Event: &process.StreamInputRequest_Start{Start: &process.StreamInputRequest_StartEvent{Process: pid}}},
		{Event: &process.StreamInputRequest_Data{Data: &process.StreamInputRequest_DataEvent{Input: &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: []byte("b")}}}}},
	} {
		if err := input.Send(m); err != nil {
			t.Error(err)
		}
	}
	if _, err := input.CloseAndReceive(); err != nil {
		t.Error(err)
	}
	if _, err := p.CloseStdin(t.Context(), connect.NewRequest(&process.CloseStdinRequest{Process: pid})); err != nil {
		t.Error(err)
	}
	var out []byte
	for again.Receive() {
		out = append(out, again.Msg().GetEvent().GetData().GetStdout()...)
	}
	if again.Err() != nil || string(out) != "ab" {
		t.Errorf("%q, %v", out, again.Err())
	}
	_, err = p.SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: pid, Signal: process.Signal_SIGNAL_SIGKILL}))
	if connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("a signal to an ended process gives %v", err)
	}
}

func TestRPCBounds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base"}`)
	f, p := w.files(s), w.processes(s)
	ctx := t.Context()
	for name, c := range map[string]struct {
		call func() error
		want connect.Code
	}{
		"a long path": {func() error {
			_, err := f.Stat(ctx, connect.NewRequest(&filesystem.StatRequest{Path: "/" + strings.Repeat("x", 5000)}))
			return err
		}, connect.CodeInvalidArgument},
		"a deep list": {func() error {
			_, err := f.ListDir(ctx, connect.NewRequest(&filesystem.ListDirRequest{Path: "/", Depth: 65}))
			return err
		}, connect.CodeInvalidArgument},
		"a large message": {func() error {
			_, err := f.Stat(ctx, connect.NewRequest(&filesystem.StatRequest{Path: strings.Repeat("x", 3<<20)}))
			return err
		}, connect.CodeResourceExhausted},
		"a watcher of nothing": {func() error {
			_, err := f.CreateWatcher(ctx, connect.NewRequest(&filesystem.CreateWatcherRequest{Path: "/none"}))
			return err
		}, connect.CodeNotFound},
		"no watcher": {func() error {
			_, err := f.GetWatcherEvents(ctx, connect.NewRequest(&filesystem.GetWatcherEventsRequest{WatcherId: "x"}))
			return err
		}, connect.CodeNotFound},
		"a tag": {func() error {
			_, err := p.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{Process: &process.ProcessSelector{Selector: &process.ProcessSelector_Tag{Tag: "x"}}}))
			return err
		}, connect.CodeUnimplemented},
		"nobody": {func() error {
			_, err := p.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{}))
			return err
		}, connect.CodeUnimplemented},
	} {
		if err := c.call(); connect.CodeOf(err) != c.want {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

func TestUploadBounds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base"}`)
	part := func(field, name string) string {
		return fmt.Sprintf("--b\r\nContent-Disposition: form-data; name=\"%s\"; filename=\"%s\"\r\n\r\nx\r\n", field, name)
	}
	send := func(query, kind, body string, header ...string) reply {
		h := map[string]string{"Content-Type": kind}
		for i := 0; i+1 < len(header); i += 2 {
			h[header[i]] = header[i+1]
		}
		return w.envd(s, ask{method: "POST", path: "/files" + query, body: body, header: h})
	}
	form := "multipart/form-data; boundary=b"
	send("", form, strings.Repeat(part("other", ""), 3)+part("file", "a.txt")+"--b--\r\n").want(t, http.StatusOK, nil)
	send("?path=/x", form, strings.Repeat(part("file", "a"), 2)+"--b--\r\n").want(t, http.StatusBadRequest, nil)
	send("", form, part("file", strings.Repeat("x", 5000))+"--b--\r\n").want(t, http.StatusBadRequest, nil)
	send("", form, part("file", "")+"--b--\r\n").want(t, http.StatusBadRequest, nil)
	send("", form, "--b\r\nContent").want(t, http.StatusBadRequest, nil)
	send("?path=/y", "text/plain", "x").want(t, http.StatusBadRequest, nil)
	send("?path=/y", "application/octet-stream", "x", "Content-Encoding", "gzip").want(t, http.StatusBadRequest, nil)
	send("?path=/y", "application/octet-stream", "x", "X-Metadata-A", strings.Repeat("b", 5000)).want(t, http.StatusBadRequest, nil)
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	if _, err := io.WriteString(z, "unpacked"); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	send("?path=y", "application/octet-stream", packed.String(), "Content-Encoding", "gzip").want(t, http.StatusOK, nil)
	if r := w.envd(s, ask{method: "GET", path: "/files?path=/root/y"}); r.Body != "unpacked" {
		t.Errorf("%d %q", r.Status, r.Body)
	}
}

// Names of owners come from the guest's lists; a file that is too long to be one counts as absent.
func TestAccounts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base"}`)
	write := func(name, text string) {
		if _, err := w.rest.WriteFile(t.Context(), "ws_"+s.SandboxID, name, strings.NewReader(text), coppice.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	as := func(user string) error {
		req := connect.NewRequest(&filesystem.StatRequest{Path: "~"})
		req.Header().Set("Authorization", "Basic "+basic(user))
		_, err := w.files(s).Stat(t.Context(), req)
		return err
	}
	write("/etc/passwd", "root:x:0:0::/root:/bin/sh\nbroken\nuser:x:1000:1000::/tmp:/bin/sh\n")
	if err := as("user"); err != nil {
		t.Error(err)
	}
	if err := as("nobody"); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Error(err)
	}
	write("/etc/passwd", "user:x:1000:1000::/tmp:/bin/sh\n"+strings.Repeat("#", 1<<20))
	if err := as("user"); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Error(err)
	}
	write("/etc/passwd", strings.Repeat("#\n", 4096)+"user:x:1000:1000::/tmp:/bin/sh\n")
	if err := as("user"); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("a line beyond the bound: %v", err)
	}
	var refused *connect.Error
	if err := as("root"); errors.As(err, &refused) {
		t.Error(err)
	}
}

func basic(user string) string {
	r, _ := http.NewRequest(http.MethodGet, "http://x", nil)
	r.SetBasicAuth(user, "")
	return strings.TrimPrefix(r.Header.Get("Authorization"), "Basic ")
}
