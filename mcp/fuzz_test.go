package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// oddAPI answers every request with the same bytes.
type oddAPI struct{ body string }

func (a *oddAPI) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Body != nil {
		_ = req.Body.Close()
	}
	return &http.Response{
		StatusCode: http.StatusOK, Status: "200 OK", Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: req, Body: io.NopCloser(strings.NewReader(a.body)),
		Header: http.Header{"Coppice-File": {`{"size":5}`}},
	}, nil
}

// fuzzed is a server with an odd API, and a client of it.
func fuzzed(tb testing.TB) (*oddAPI, *sdk.ClientSession) {
	tb.Helper()
	api := &oddAPI{}
	client, err := coppice.New(coppice.Config{Server: "http://127.0.0.1:1", Transport: api})
	if err != nil {
		tb.Fatal(err)
	}
	here, there := sdk.NewInMemoryTransports()
	s := newServer(Config{Log: slog.New(slog.DiscardHandler)}, client, nil, make(slots, maxCalls).enter)
	serving, err := s.Connect(context.Background(), here, nil) //nolint:usetesting // it outlives the test: closing ends it
	if err != nil {
		tb.Fatal(err)
	}
	session, err := sdk.NewClient(&sdk.Implementation{Name: "fuzz"}, nil).Connect(context.Background(), there, nil) //nolint:usetesting // likewise
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = session.Close()
		_ = serving.Wait()
	})
	return api, session
}

// FuzzArguments calls every tool with any arguments and any answer of the API: each call gets an answer, which is bounded,
// and a failed one has a code of its own and is not the server's fault.
func FuzzArguments(f *testing.F) {
	for _, tool := range []string{"workspace_create", "workspace_list", "workspace_show", "workspace_set_state", "exec_output", "exec_kill", "file_read", "file_write", "file_list", "checkpoint", "fork", "restore", "tree", "diff", "effects", "grant_list", "workspace_delete"} {
		f.Add(tool, `{"workspace":"ws_1","path":"/a","content":"x","session":"s","of":"ckpt_1","from":"ckpt_1","to":"ckpt_2","checkpoint":"ckpt_1","state":"ready"}`, `{"id":"x","state":"ready","items":[{}]}`)
	}
	f.Add("file_read", `{"workspace":"ws_1","path":"/a","offset":3}`, "hello")
	f.Add("exec_output", `{"session":"s","offset":-1,"max_bytes":9999999}`, `{"stdout_bytes":-5}`)
	f.Add("exec_output", `{"session":"s"}`, `{"stdout_bytes":9223372036854775807,"state":"exited"}`)
	f.Add("tree", `{"of":"ckpt_1"}`, `{"items":[{"checkpoint":{"id":"a","parent_id":"a"}},{"checkpoint":{"id":"a","parent_id":"a"}}]}`)
	f.Add("fork", `{"of":{"a":[1,2]},"count":1e99}`, `{"children":[{},{"problem":{"message":"\u001b"}}]}`)
	f.Add("diff", `{"from":"ckpt_1","to":"ckpt_2"}`, `{"items":[{"path":"\u202e","path_base64":"%%"}],"processes":{"started":[{}]}}`)
	f.Add("workspace_list", `[]`, `null`)
	f.Add("workspace_show", `{"workspace":"demo","workspace":"other"}`, `<html>`)
	api, session := fuzzed(f)
	f.Fuzz(func(t *testing.T, tool, arguments, answer string) {
		if tool == "exec" || strings.Contains(strings.ToLower(answer), "cur") || strings.Contains(answer, `\u0`) {
			return // a program whose end nobody reports, or a list without end: the API is not that odd
		}
		api.body = answer
		var in any = json.RawMessage(arguments)
		if !json.Valid([]byte(arguments)) {
			in = arguments
		}
		ctx, cancel := context.WithTimeout(t.Context(), maxCall)
		defer cancel()
		res, err := session.CallTool(ctx, &sdk.CallToolParams{Name: tool, Arguments: in})
		if err != nil {
			if errors.Is(err, sdk.ErrConnectionClosed) {
				t.Fatalf("%s %s: the server has ended: %v", tool, arguments, err)
			}
			return // an unknown tool, or a message that is none
		}
		b, err := json.Marshal(res)
		if err != nil || len(b) > 4<<20+20*len(answer) {
			t.Errorf("an answer of %d bytes, %v", len(b), err)
		}
		text := res.Content[0].(*sdk.TextContent).Text
		if res.IsError && !strings.HasPrefix(text, "error ") || strings.HasPrefix(text, "error "+codeInternal) {
			t.Errorf("%s %s with %s: %s", tool, arguments, answer, text)
		}
		if strings.ContainsAny(text, "\x1b\u202e\x00") {
			t.Errorf("%s: characters that do not show: %q", tool, text)
		}
	})
}
