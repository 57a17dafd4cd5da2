package fakevmm_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/guest"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
)

const memoryMiB = 2

// host has the bases and files of a runner.
type host struct {
	driver *fakevmm.Driver
	dir    string
	bases  *memory.BaseStore
}

func newHost(t *testing.T, cfg fakevmm.Config) *host {
	t.Helper()
	h := &host{driver: fakevmm.New(cfg), dir: t.TempDir()}
	var err error
	if h.bases, err = memory.NewBaseStore(filepath.Join(h.dir, "bases"), false); err != nil {
		t.Fatal(err)
	}
	return h
}

// template is a captured, frozen guest.
type template struct {
	base  *memory.Base
	delta *memory.Delta
	state *os.File
}

func (h *host) spawn(t *testing.T, base *memory.Base, restore bool) vmm.Machine {
	t.Helper()
	m, err := h.driver.Spawn(t.Context(), vmm.Spec{
		ID: core.NewID[core.SandboxID](), Dir: h.dir, MemoryMiB: memoryMiB, Base: base.File(), Restore: restore,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Kill(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return m
}

func (h *host) boot(t *testing.T) (vmm.Machine, *memory.Base) {
	t.Helper()
	zero, err := h.bases.Zero(memoryMiB << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = zero.Close() })
	m := h.spawn(t, zero, false)
	if err := m.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	return m, zero
}

// capture freezes a guest and captures it; the machine stays paused.
func (h *host) capture(t *testing.T, m vmm.Machine, base *memory.Base, agent *guest.Client, id string) *template {
	t.Helper()
	if _, err := agent.Quiesce(t.Context(), guestapi.QuiesceRequest{CaptureID: id}); err != nil {
		t.Fatal(err)
	}
	region, err := m.Memory()
	if err != nil {
		t.Fatal(err)
	}
	c, err := memory.Prepare(region)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := m.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(h.dir, core.Short(core.NewID[core.CheckpointID]()))
	to, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = to.Close() })
	if err := errors.Join(m.SaveState(t.Context(), to), c.Copy(), c.Delta().WriteFile(path+".delta")); err != nil {
		t.Fatal(err)
	}
	delta, err := memory.OpenDelta(path + ".delta")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(delta.Close)
	return &template{base: base, delta: delta, state: to}
}

func (tmpl *template) restore() vmm.RestoreSpec {
	return vmm.RestoreSpec{State: tmpl.state, Inject: func(_ context.Context, r memory.Region) error { return tmpl.delta.Inject(r) }}
}

// fork makes a running machine in quarantine.
func (h *host) fork(t *testing.T, tmpl *template) vmm.Machine {
	t.Helper()
	m := h.spawn(t, tmpl.base, true)
	if err := errors.Join(m.Restore(t.Context(), tmpl.restore()), m.Resume(t.Context())); err != nil {
		t.Fatal(err)
	}
	return m
}

func dial(t *testing.T, m vmm.Machine) *guest.Client {
	t.Helper()
	c, err := guest.Dial(t.Context(), m.DialAgent)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

var nextIdentity struct {
	sync.Mutex
	n int
}

func resealRequest() guestapi.ResealRequest {
	nextIdentity.Lock()
	nextIdentity.n++
	n := nextIdentity.n
	nextIdentity.Unlock()
	entropy := make([]byte, guestapi.EntropySize)
	copy(entropy, fmt.Sprintf("entropy %d", n))
	return guestapi.ResealRequest{
		CheckpointID: core.NewID[core.CheckpointID](), Entropy: entropy, HostTimeNS: time.Now().UnixNano(),
		Identity: core.Identity{
			Generation: fmt.Sprintf("generation-%d", n), Hostname: fmt.Sprintf("host-%d", n), MachineID: fmt.Sprintf("%032x", n),
			MAC: fmt.Sprintf("02:00:00:00:%02x:%02x", n>>8&255, n&255), IP: netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}),
		},
		Network: guestapi.Network{Prefix: 32, Gateway: netip.MustParseAddr("10.255.255.1")}, Token: fmt.Sprintf("token %d", n),
		Env: map[string]string{"SANDBOX": fmt.Sprint(n)},
	}
}

// reseal gives a fork its own identity, like a runner.
func reseal(ctx context.Context, agent *guest.Client, req guestapi.ResealRequest) (core.ResealReport, error) {
	report, err := agent.Reseal(ctx, req)
	if err != nil {
		return report, err
	}
	if err := guest.Verify(report, req); err != nil {
		return report, err
	}
	_, err = agent.Release(ctx, guestapi.ReleaseRequest{Generation: req.Identity.Generation})
	return report, err
}

func request(t *testing.T, agent *guest.Client, method, path string, body any) (int, http.Header, []byte) {
	t.Helper()
	var in io.Reader
	switch b := body.(type) {
	case nil:
	case []byte:
		in = bytes.NewReader(b)
	default:
		raw, err := json.Marshal(b)
		if err != nil {
			t.Fatal(err)
		}
		in = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://guest"+path, in)
	if err != nil {
		t.Fatal(err)
	}
	res, err := agent.Transport().RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	out, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(res.Header, res.Trailer)
	return res.StatusCode, res.Header, out
}

func start(t *testing.T, agent *guest.Client, spec guestapi.SessionSpec) guestapi.Session {
	t.Helper()
	status, _, b := request(t, agent, http.MethodPost, guestapi.PathSessions, spec)
	var s guestapi.Session
	if err := json.Unmarshal(b, &s); err != nil || status != http.StatusCreated {
		t.Fatalf("start %v: %d %s", spec.Command, status, b)
	}
	return s
}

func sessionPath(pattern string, id core.SessionID) string {
	return strings.Replace(pattern, "{id}", string(id), 1)
}

func wait(t *testing.T, agent *guest.Client, id core.SessionID) guestapi.Session {
	t.Helper()
	_, _, b := request(t, agent, http.MethodGet, sessionPath(guestapi.PathSessionWait, id)+"?timeout_ms=60000", nil)
	var s guestapi.Session
	if err := json.Unmarshal(b, &s); err != nil || s.ExitCode == nil {
		t.Fatalf("wait for %s: %s", id, b)
	}
	return s
}

// run runs a script and returns its output and exit status.
func run(t *testing.T, agent *guest.Client, script string) (stdout string, status int) {
	t.Helper()
	s := wait(t, agent, start(t, agent, guestapi.SessionSpec{Command: []string{"/bin/sh", "-c", script}}).ID)
	_, _, b := request(t, agent, http.MethodGet, sessionPath(guestapi.PathSessionOutput, s.ID), nil)
	return string(b), *s.ExitCode
}

// put writes the file /f.
func put(t *testing.T, agent *guest.Client, content string) {
	t.Helper()
	if status, _, b := request(t, agent, http.MethodPut, guestapi.PathFiles+"?path=/f", []byte(content)); status != http.StatusOK {
		t.Fatalf("write: %d %s", status, b)
	}
}

func closeStdin(t *testing.T, agent *guest.Client, id core.SessionID) {
	t.Helper()
	if status, _, b := request(t, agent, http.MethodPost, sessionPath(guestapi.PathSessionStdin, id)+"?close=1", []byte{}); status != http.StatusNoContent {
		t.Fatalf("close stdin: %d %s", status, b)
	}
}

func TestSessions(t *testing.T) {
	t.Parallel()
	m, _ := newHost(t, fakevmm.Config{}).boot(t)
	agent := dial(t, m)
	if got, status := run(t, agent, "inc; inc; nothing-like-it; echo a  b"); got != "1\n2\na b\n" || status != 0 {
		t.Errorf("got %q and %d", got, status)
	}
	if got, status := run(t, agent, "cat /absent"); got != "" || status != 1 {
		t.Errorf("got %q and %d", got, status)
	}
	for _, spec := range []guestapi.SessionSpec{{}, {Command: []string{"no-such-program"}}} {
		if status, _, b := request(t, agent, http.MethodPost, guestapi.PathSessions, spec); status < 400 {
			t.Errorf("%+v was started: %s", spec, b)
		}
	}

	cat := start(t, agent, guestapi.SessionSpec{Command: []string{"cat"}, StdinOpen: true})
	stdin := sessionPath(guestapi.PathSessionStdin, cat.ID)
	if status, _, b := request(t, agent, http.MethodPost, stdin, []byte("one\n")); status != http.StatusNoContent {
		t.Fatalf("stdin: %d %s", status, b)
	}
	follow := make(chan string)
	go func() {
		_, h, b := request(t, agent, http.MethodGet, sessionPath(guestapi.PathSessionOutput, cat.ID)+"?follow=1&offset=2", nil)
		follow <- fmt.Sprint(string(b), h.Get(guestapi.HeaderOffset), h.Get(guestapi.HeaderEndOffset), h.Get(guestapi.HeaderEOF))
	}()
	request(t, agent, http.MethodPost, stdin+"?close=1", []byte("two\n"))
	if got, want := <-follow, "e\ntwo\n28true"; got != want {
		t.Errorf("followed %q, want %q", got, want)
	}
	if s := wait(t, agent, cat.ID); *s.ExitCode != 0 || s.StdoutBytes != 8 || s.StdinOpen {
		t.Errorf("cat ended as %+v", s)
	}
	if status, _, _ := request(t, agent, http.MethodPost, stdin, []byte("three")); status != http.StatusConflict {
		t.Errorf("a session that has ended takes input: %d", status)
	}
	request(t, agent, http.MethodDelete, sessionPath(guestapi.PathSession, cat.ID), nil)
	if status, _, _ := request(t, agent, http.MethodGet, sessionPath(guestapi.PathSession, cat.ID), nil); status != http.StatusNotFound {
		t.Errorf("a deleted session answers %d", status)
	}
}

func TestFiles(t *testing.T) {
	t.Parallel()
	m, _ := newHost(t, fakevmm.Config{}).boot(t)
	agent := dial(t, m)
	for _, c := range []struct {
		method, query string
		body          []byte
		status        int
		want          string
	}{
		{http.MethodPut, "path=/a/b&mode=0600", []byte("hello"), 200, `"mode":"0600"`},
		{http.MethodGet, "path=/a/b", nil, 200, "hello"},
		{http.MethodGet, "path=/a/b&stat=1", nil, 200, `"type":"file"`},
		{http.MethodGet, "path=/c", nil, 404, "FILE_NOT_FOUND"},
		{http.MethodDelete, "path=/a/b", nil, 204, ""},
		{http.MethodGet, "path=/a/b", nil, 404, "FILE_NOT_FOUND"},
		{http.MethodPut, "path=/big", make([]byte, 3<<20), 429, "DISK_FULL"},
	} {
		status, _, b := request(t, agent, c.method, guestapi.PathFiles+"?"+c.query, c.body)
		if status != c.status || !strings.Contains(string(b), c.want) {
			t.Errorf("%s %s: %d %s, want %d and %s", c.method, c.query, status, b, c.status, c.want)
		}
	}
}

func TestAttach(t *testing.T) {
	t.Parallel()
	m, _ := newHost(t, fakevmm.Config{}).boot(t)
	agent := dial(t, m)
	proxy := httptest.NewServer(agent.Proxy(func(w http.ResponseWriter, _ *http.Request, err error) {
		http.Error(w, err.Error(), http.StatusBadGateway)
	}))
	defer proxy.Close()
	s := start(t, agent, guestapi.SessionSpec{Command: []string{"sh", "-c", "echo hello; cat; exit 3; echo no"}, StdinOpen: true})
	conn, res, err := websocket.Dial(t.Context(), proxy.URL+sessionPath(guestapi.PathSessionAttach, s.ID), nil)
	if err != nil {
		t.Fatal(err)
	}
	if res.Body != nil {
		defer res.Body.Close()
	}
	defer func() { _ = conn.CloseNow() }()
	if err := conn.Write(t.Context(), websocket.MessageBinary, []byte("there")); err != nil {
		t.Fatal(err)
	}
	if err := conn.Write(t.Context(), websocket.MessageText, []byte(`{"type":"close_stdin"}`)); err != nil {
		t.Fatal(err)
	}
	var out []byte
	for {
		kind, b, err := conn.Read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if kind == websocket.MessageBinary {
			out = append(out, b[guestapi.AttachHeadLen:]...)
			continue
		}
		var msg guestapi.AttachMessage
		if err := json.Unmarshal(b, &msg); err != nil || msg.Type != guestapi.AttachExit || *msg.Session.ExitCode != 3 {
			t.Errorf("got %s, want the exit", b)
		}
		break
	}
	if string(out) != "hello\nthere" {
		t.Errorf("got %q", out)
	}
}
