package coppice_test

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
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/coppice-dev/coppice/api"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// program is a session behind the session routes; its program has already written all its output. It cuts connections.
type program struct {
	stdout, stderr string
	first          int64 // offset of the oldest byte of stdout that is kept
	cut            int   // bytes of body after which a connection is cut; 0 never
	noTrailers     bool
	started        api.ExecRequest
}

func (p *program) session() api.Session {
	now := time.Unix(5, 0).UTC()
	return api.Session{
		ID: "sess_1", WorkspaceID: "ws_1", State: api.SessionExited, ExitCode: new(3), EndedAt: now, StartedAt: now,
		StdoutBytes: int64(len(p.stdout)), StderrBytes: int64(len(p.stderr)), StdoutFirst: p.first, Command: []string{"x"},
	}
}

func (p *program) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.Method + " " + r.URL.Path {
	case "POST /v1/workspaces/ws_1/exec":
		if err := json.NewDecoder(r.Body).Decode(&p.started); err != nil {
			problem(w, api.Problem{Status: 400, Code: "MALFORMED_BODY"})
			return
		}
		w.WriteHeader(http.StatusCreated)
		s := p.session()
		s.State, s.ExitCode = api.SessionRunning, nil
		_ = json.NewEncoder(w).Encode(s)
	case "GET /v1/sessions/sess_1":
		_ = json.NewEncoder(w).Encode(p.session())
	case "GET /v1/sessions/sess_1/output":
		p.output(w, r)
	default:
		problem(w, api.Problem{Status: 404, Code: "ROUTE_NOT_FOUND", Detail: r.URL.Path})
	}
}

func (p *program) output(w http.ResponseWriter, r *http.Request) {
	text := p.stdout
	if r.URL.Query().Get("stream") == "stderr" {
		text = p.stderr
	}
	offset, _ := strconv.ParseInt(r.URL.Query().Get("offset"), 10, 64)
	offset = max(offset, p.first)
	w.Header().Set("Coppice-Offset", strconv.FormatInt(offset, 10))
	w.Header().Set("Trailer", "Coppice-Eof")
	body := text[min(offset, int64(len(text))):]
	if p.cut > 0 && len(body) > p.cut {
		_, _ = io.WriteString(w, body[:p.cut])
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
	_, _ = io.WriteString(w, body)
	if !p.noTrailers {
		w.Header().Set("Coppice-Eof", "true")
	}
}

func TestRunCopiesAllOutput(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]*program{
		"whole":       {stdout: strings.Repeat("out", 100_000), stderr: "err"},
		"cut":         {stdout: strings.Repeat("0123456789", 1000), stderr: "", cut: 700},
		"no trailers": {stdout: "abc", stderr: "d", noTrailers: true},
		"silent":      {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := serve(t, p)
			var stdout, stderr bytes.Buffer
			s, err := c.Run(t.Context(), "ws_1", coppice.ExecRequest{Command: []string{"x"}}, &stdout, &stderr)
			if err != nil || s.ExitCode == nil || *s.ExitCode != 3 || p.started.Wait == nil || *p.started.Wait {
				t.Fatalf("session %+v, %v", s, err)
			}
			if stdout.String() != p.stdout || stderr.String() != p.stderr {
				t.Errorf("got %d and %d bytes, want %d and %d", stdout.Len(), stderr.Len(), len(p.stdout), len(p.stderr))
			}
		})
	}
}

type brokenWriter struct{}

var errPipe = errors.New("pipe")

func (brokenWriter) Write([]byte) (int, error) { return 0, errPipe }

func TestFollowErrors(t *testing.T) {
	t.Parallel()
	dropped := serve(t, &program{stdout: "0123456789", first: 4})
	if err := dropped.Follow(t.Context(), "sess_1", coppice.Stdout, 0, io.Discard); err == nil || !strings.Contains(err.Error(), "4 bytes of stdout from offset 0") {
		t.Errorf("dropped output: %v", err)
	}
	var b bytes.Buffer
	if err := dropped.Follow(t.Context(), "sess_1", coppice.Stdout, 6, &b); err != nil || b.String() != "6789" {
		t.Errorf("from an offset: %q, %v", b.String(), err)
	}
	c := serve(t, &program{stdout: "x"})
	if err := c.Follow(t.Context(), "sess_1", coppice.Stdout, 0, brokenWriter{}); !errors.Is(err, errPipe) {
		t.Errorf("got %v", err)
	}
	if err := c.Follow(t.Context(), "sess_2", coppice.Stdout, 0, &b); !errors.Is(err, coppice.Code("ROUTE_NOT_FOUND")) {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Follow(ctx, "sess_1", coppice.Stdout, 0, &b); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestExecDecodesOutput(t *testing.T) {
	t.Parallel()
	binaryOut := []byte{0xff, 0, 1}
	for _, x := range []struct {
		result api.ExecResult
		want   []byte
	}{
		{api.ExecResult{Encoding: api.EncodingUTF8, Stdout: "grüße"}, []byte("grüße")},
		{api.ExecResult{Encoding: api.EncodingBase64, Stdout: base64.StdEncoding.EncodeToString(binaryOut)}, binaryOut},
	} {
		c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var req api.ExecRequest
			if err := json.NewDecoder(r.Body).Decode(&req); err != nil || !*req.Wait {
				t.Errorf("request %+v, %v", req, err)
			}
			_ = json.NewEncoder(w).Encode(x.result)
		}))
		res, err := c.Exec(t.Context(), "ws_1", coppice.ExecRequest{Command: []string{"x"}})
		if err != nil {
			t.Fatal(err)
		}
		if out, _, err := res.Output(); err != nil || !bytes.Equal(out, x.want) {
			t.Errorf("got %q, %v", out, err)
		}
	}
	bad := coppice.ExecResult{Encoding: coppice.EncodingBase64, Stdout: "***"}
	if _, _, err := bad.Output(); err == nil {
		t.Error("bad base64 was taken")
	}
}

func TestWriteStdin(t *testing.T) {
	t.Parallel()
	var got string
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got += fmt.Sprintf("%s|%s|%s;", b, r.URL.Query().Get("close"), r.Header.Get("Content-Type"))
		w.WriteHeader(http.StatusNoContent)
	}))
	if err := errors.Join(
		c.WriteStdin(t.Context(), "sess_1", strings.NewReader("hi"), false),
		c.WriteStdin(t.Context(), "sess_1", nil, true),
	); err != nil {
		t.Fatal(err)
	}
	if want := "hi|false|application/octet-stream;|true|application/octet-stream;"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// terminalServer answers an attached client: it echoes input, reports sizes and ends on "exit".
func terminalServer(t *testing.T) http.Handler {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/sessions/{id}/attach", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(api.Attachment{
			Transport: api.TransportWebsocket, URL: "/v1/attach/" + r.PathValue("id"), Token: "once", ExpiresAt: time.Unix(9, 0),
		})
	})
	mux.HandleFunc("GET /v1/attach/{id}", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("token") != "once" || r.Header.Get("Authorization") != "" || r.PathValue("id") != "sess_1" {
			problem(w, api.Problem{Status: 401, Code: "UNAUTHENTICATED", Detail: r.URL.String()})
			return
		}
		conn, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		offset, _ := strconv.ParseUint(r.URL.Query().Get("stdout_offset"), 10, 64)
		for {
			kind, data, err := conn.Read(r.Context())
			if err != nil {
				return
			}
			if kind == websocket.MessageText {
				_ = conn.Write(r.Context(), websocket.MessageText, data) // control messages are sent back
				continue
			}
			head := append([]byte{1}, binary.BigEndian.AppendUint64(nil, offset)...)
			offset += uint64(len(data))
			_ = conn.Write(r.Context(), websocket.MessageBinary, append(head, data...))
			if string(data) == "exit" {
				_ = conn.Write(r.Context(), websocket.MessageText, []byte(`{"type":"exit","session":{"id":"other","exit_code":7,"timed_out":false,"new_field":1}}`))
				_ = conn.Close(websocket.StatusNormalClosure, "")
				return
			}
		}
	})
	return mux
}

func TestAttach(t *testing.T) {
	t.Parallel()
	c := serve(t, terminalServer(t))
	ctx := t.Context()
	conn, err := c.Attach(ctx, "sess_1", coppice.AttachOptions{StdoutOffset: 100})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(conn.Write(ctx, []byte("ab")), conn.Resize(ctx, 80, 24), conn.Signal(ctx, "INT"), conn.CloseStdin(ctx), conn.Write(ctx, []byte("exit"))); err != nil {
		t.Fatal(err)
	}
	var got []string
	for {
		e, err := conn.Next(ctx)
		if err != nil {
			t.Fatalf("after %q: %v", got, err)
		}
		if e.Message == nil {
			got = append(got, fmt.Sprintf("%s@%d %s", e.Stream, e.Offset, e.Data))
			continue
		}
		got = append(got, fmt.Sprintf("%s %d %d %s", e.Message.Type, e.Message.Cols, e.Message.Rows, e.Message.Signal))
		if e.Message.Type == coppice.AttachExit {
			if e.Message.Session.ExitCode != 7 {
				t.Errorf("exit %+v", e.Message.Session)
			}
			break
		}
	}
	want := []string{"stdout@100 ab", "resize 80 24 ", "signal 0 0 INT", "close_stdin 0 0 ", "stdout@102 exit", "exit 0 0 "}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got %q, want %q", got, want)
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	if _, err := c.Attach(ctx, "sess_2", coppice.AttachOptions{}); !errors.Is(err, coppice.Code("UNAUTHENTICATED")) {
		t.Errorf("refused attachment: %v", err)
	}
}
