package mcp_test

import (
	"context"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/controllertest"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/internal/masterkey"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/mcp"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestMain(m *testing.M) { testleak.Main(m, testpg.Leak()) }

const (
	adminKey = controllertest.Key
	patience = 5 * time.Minute // of what would hang; nothing that is tested depends on it
)

// world is a controller with a real database and a simulated runner.
type world struct {
	cell   *controllertest.Cell
	url    string
	runner *runnertest.Runner
	inner  string          // the listener for runners
	admin  *coppice.Client // with the key of the server's start
}

func newWorld(t *testing.T) *world {
	t.Helper()
	master := filepath.Join(t.TempDir(), "master.key")
	if _, err := masterkey.Create(master); err != nil {
		t.Fatal(err)
	}
	wrapper, err := masterkey.OpenRing(master)
	if err != nil {
		t.Fatal(err)
	}
	cell := controllertest.Start(t, func(c *controller.Config) { c.Wrapper, c.RunnerRetry = wrapper, time.Second })
	return &world{cell: cell, url: cell.URL, runner: cell.Runner, inner: cell.Inner, admin: cell.REST}
}

// stdio starts a server on streams, and a client of it that wants a version of the protocol.
func (w *world) stdio(t *testing.T, cfg mcp.Config, key, version string) *session {
	t.Helper()
	return w.stdioThatEnds(t, cfg, key, version, "")
}

// stdioThatEnds is stdio of a server that ends with an error.
func (w *world) stdioThatEnds(t *testing.T, cfg mcp.Config, key, version, want string) *session {
	t.Helper()
	if cfg.Server == "" {
		cfg.Server = w.url
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	fromClient, toServer := io.Pipe()
	fromServer, toClient := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- mcp.ServeStdio(context.WithoutCancel(t.Context()), cfg, key, fromClient, toClient)
		_ = toClient.Close()
	}()
	s := connect(t, &sdk.IOTransport{Reader: fromServer, Writer: toServer}, version)
	t.Cleanup(func() {
		_ = s.Close()
		_ = toServer.Close()
		if err := <-ended; (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("the server on stdio ended with %v, want %q", err, want)
		}
	})
	return s
}

// session is a client's.
type session struct {
	*sdk.ClientSession
	progress chan *sdk.ProgressNotificationParams
}

func connect(t *testing.T, transport sdk.Transport, version string) *session {
	t.Helper()
	s := &session{progress: make(chan *sdk.ProgressNotificationParams, 1024)}
	c := sdk.NewClient(&sdk.Implementation{Name: "test", Version: "1"}, &sdk.ClientOptions{
		ProgressNotificationHandler: func(_ context.Context, r *sdk.ProgressNotificationClientRequest) { s.progress <- r.Params },
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	var err error
	if s.ClientSession, err = c.Connect(ctx, transport, &sdk.ClientSessionOptions{ProtocolVersion: version}); err != nil {
		t.Fatal(err)
	}
	return s
}

type args = map[string]any

// call calls a tool and returns its answer.
func (s *session) call(t *testing.T, tool string, a args) *sdk.CallToolResult {
	t.Helper()
	res, err := s.CallTool(t.Context(), &sdk.CallToolParams{Name: tool, Arguments: a})
	if err != nil {
		t.Fatalf("%s %v: %v", tool, a, err)
	}
	return res
}

// ok calls a tool that must succeed, and returns its structured answer and its text.
func (s *session) ok(t *testing.T, tool string, a args) (out map[string]any, text string) {
	t.Helper()
	res := s.call(t, tool, a)
	text = textOf(t, res)
	if res.IsError {
		t.Fatalf("%s %v failed: %s", tool, a, text)
	}
	out, ok := res.StructuredContent.(map[string]any)
	if !ok {
		t.Fatalf("%s %v: no structured answer: %T", tool, a, res.StructuredContent)
	}
	return out, text
}

// refused calls a tool that must fail with a code.
func (s *session) refused(t *testing.T, code, tool string, a args) string {
	t.Helper()
	res := s.call(t, tool, a)
	text := textOf(t, res)
	if !res.IsError || !strings.HasPrefix(text, "error "+code+"\nhint: ") {
		t.Errorf("%s %v: want %s, got %s", tool, a, code, text)
	}
	problem, _ := res.Meta["coppice.dev/error"].(map[string]any)
	if problem["code"] != code || problem["hint"] == "" {
		t.Errorf("%s %v: the error's fields are %v", tool, a, problem)
	}
	return text
}

func textOf(t *testing.T, res *sdk.CallToolResult) string {
	t.Helper()
	if len(res.Content) != 1 {
		t.Fatalf("%d pieces of content", len(res.Content))
	}
	text, ok := res.Content[0].(*sdk.TextContent)
	if !ok {
		t.Fatalf("content is %T", res.Content[0])
	}
	return text.Text
}
