package guest_test

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

var record = flag.Bool("record", false, "record an exchange with a real agent under guestagent/guestapi/testdata")

// exchange is one request and its answer, as guestagent/guestapi/testdata keeps them.
type exchange struct {
	Method  string            `json:"method"`
	Path    string            `json:"path"`
	Request json.RawMessage   `json:"request,omitempty"`
	Status  int               `json:"status"`
	Header  map[string]string `json:"header,omitempty"`
	Trailer map[string]string `json:"trailer,omitempty"`
	Answer  json.RawMessage   `json:"answer,omitempty"`
	Body    []byte            `json:"body,omitempty"` // of an answer that is not JSON
}

// TestVMRecord records what an agent of today says, so that the types of tomorrow can be held against it. Run it with -record
// when the protocol's version grows; otherwise it only checks that all of it works.
func TestVMRecord(t *testing.T) {
	v := startVM(t, vmOptions{})
	conn := v.connect("agent")
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	link, err := guestapi.Greet(ctx, conn)
	if err != nil {
		t.Fatal(err)
	}
	cfg := yamux.DefaultConfig()
	cfg.EnableKeepAlive, cfg.LogOutput = false, io.Discard
	mux, err := yamux.Client(link, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mux.Close() }()
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) { return mux.Open() },
	}}
	var list []exchange
	do := func(method, path string, in any) exchange {
		t.Helper()
		x := exchange{Method: method, Path: path}
		var body io.Reader
		if in != nil {
			if x.Request, err = json.Marshal(in); err != nil {
				t.Fatal(err)
			}
			body = bytes.NewReader(x.Request)
		}
		req, err := http.NewRequestWithContext(t.Context(), method, "http://guest"+path, body)
		if err != nil {
			t.Fatal(err)
		}
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = res.Body.Close() }()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		if x.Status = res.StatusCode; res.Header.Get("Content-Type") == "application/json" {
			x.Answer = b
		} else {
			x.Body = b
		}
		keep := func(h http.Header) map[string]string {
			out := map[string]string{}
			for name := range h {
				if strings.HasPrefix(name, "Coppice-") {
					out[name] = h.Get(name)
				}
			}
			return out
		}
		x.Header, x.Trailer = keep(res.Header), keep(res.Trailer)
		list = append(list, x)
		return x
	}
	var h guestapi.Health
	if err := json.Unmarshal(do("GET", guestapi.PathHealth, nil).Answer, &h); err != nil {
		t.Fatal(err)
	}
	id := core.NewID[core.SessionID]()
	do("POST", guestapi.PathSessions, guestapi.SessionSpec{
		ID: id, Command: []string{"sh", "-c", "cat; echo err >&2; exit 3"}, Cwd: "/", Env: map[string]string{"A": "b"}, Stdin: []byte("in\n"), TimeoutMS: 60_000, User: "nobody",
	})
	do("GET", route(guestapi.PathSessionOutput, id)+"?follow=1", nil)
	do("GET", route(guestapi.PathSessionOutput, id)+"?stream=stderr&offset=1&follow=1", nil)
	do("GET", route(guestapi.PathSessionWait, id)+"?timeout_ms=60000", nil)
	do("GET", guestapi.PathSessions, nil)
	do("POST", guestapi.PathSessions, guestapi.SessionSpec{Command: []string{"no-such-program"}})
	do("PUT", guestapi.PathFiles+"?path=/root/dir/file&mkdirs=1", "content")
	do("GET", guestapi.PathFiles+"?path=/root/dir&list=1", nil)
	do("GET", guestapi.PathFiles+"?path=/root/dir/file", nil)
	do("GET", guestapi.PathProcesses, nil)
	do("GET", guestapi.PathPorts, nil)
	do("POST", guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: "ckpt_1", TimeoutMS: 5000})
	do("POST", guestapi.PathRelease, guestapi.ReleaseRequest{Generation: h.Generation})
	do("POST", guestapi.PathReseed, guestapi.ReseedRequest{Entropy: entropy(), Generation: h.Generation})
	do("POST", guestapi.PathRelease, guestapi.ReleaseRequest{Generation: h.Generation})
	do("POST", guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: "ckpt_2"})
	do("POST", guestapi.PathReseal, wantReseal(1, "generation-1"))
	do("GET", guestapi.PathHealth, nil)
	do("POST", guestapi.PathRelease, guestapi.ReleaseRequest{Generation: "generation-1"})
	do("DELETE", route(guestapi.PathSession, id), nil)
	var statuses []int
	for _, x := range list {
		statuses = append(statuses, x.Status)
	}
	t.Logf("answers %v", statuses)
	if !*record {
		return
	}
	b, err := json.MarshalIndent(list, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("..", "..", "guestagent", "guestapi", "testdata", "v1", "exchange.json")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append(b, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}
