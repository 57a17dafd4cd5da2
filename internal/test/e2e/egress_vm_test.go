package e2e

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testoutside"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestEgress follows what a workspace may reach and what it sent through everything: API, controller, runner, egress process, guest, and back. A
// server that is killed takes no tunnel with it and loses nothing of what was sent.
func TestEgress(t *testing.T) {
	o := testoutside.New(t)
	s := newStack(t, "--egress-allow-private", testoutside.Prefix, "--egress-resolver", o.Names)
	ws, err := s.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{
		Image: string(baseImage(t)), Resources: small(), Network: coppice.NetworkRequest{Allow: &[]string{"a.example.com"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	curl := func(id coppice.WorkspaceID, args, want string) {
		t.Helper()
		got := shell(t, s, id, "curl -sS -m 20 --cacert /root/ca.pem "+args+" 2>&1 || echo failed $?")
		if !strings.Contains(got, want) {
			t.Errorf("curl %s said %q, want %q", args, got, want)
		}
	}
	trust := "cat > /root/ca.pem <<END\n" + o.CA + "END\n"
	shell(t, s, ws.ID, trust)
	curl(ws.ID, "https://a.example.com/1", "GET a.example.com/1")
	curl(ws.ID, "--noproxy '*' https://a.example.com/2", "GET a.example.com/2")
	curl(ws.ID, "-X POST http://a.example.com/changed", "POST a.example.com/changed")
	curl(ws.ID, "https://b.example.com/", "failed")

	// A fork has the rules and may have fewer.
	point := checkpoint(t, s, ws.ID)
	child := fork(t, s, point.ID, coppiceFork{})[0].Workspace.ID
	curl(child, "https://a.example.com/child", "GET a.example.com/child")
	curl(child, "https://b.example.com/child", "failed")

	launch(t, s, ws.ID, "curl", "-sS", "--cacert", "/root/ca.pem", "-o", "/dev/null", "https://a.example.com/stream")
	eventually.True(t, "a tunnel is open", func() bool { return o.Streams.Load() == 1 })
	s.kill(t)
	s.start(t)
	if n := o.Streams.Load(); n != 1 {
		t.Errorf("%d tunnels are open after a restart of the server, want 1", n)
	}
	curl(ws.ID, "https://a.example.com/later", "GET a.example.com/later")

	began := time.Now()
	if _, err := s.client.PatchWorkspace(t.Context(), ws.ID, coppice.PatchWorkspaceRequest{Network: &coppice.NetworkPatch{Allow: &[]string{"b.example.com"}}}); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the tunnel has ended", func() bool { return o.Streams.Load() == 0 })
	load, _ := os.ReadFile("/proc/loadavg")
	t.Logf("a tunnel ended %s after the request for other rules; load %s", time.Since(began), load)
	curl(ws.ID, "https://b.example.com/3", "GET b.example.com/3")
	curl(ws.ID, "https://a.example.com/3", "failed")

	want := []string{"allowed http POST a.example.com:80/changed", "allowed tls a.example.com:443", "allowed tls b.example.com:443"}
	var got []string
	eventually.True(t, "the controller has what was sent", func() bool {
		got = nil
		for f, err := range s.client.Egress(t.Context(), ws.ID, coppice.EgressFilter{}) {
			if err != nil {
				t.Fatal(err)
			}
			text := fmt.Sprintf("%s %s ", f.Outcome, f.Protocol)
			if f.Method != "" && f.Method != http.MethodConnect {
				text += f.Method + " "
			}
			text += fmt.Sprintf("%s:%d%s", f.Host, f.Port, f.Path)
			if f.Outcome == coppice.FlowDenied || !f.EndedAt.IsZero() {
				got = append(got, text)
			}
		}
		return len(got) >= 8
	})
	slices.Sort(got)
	t.Logf("flows: %q", got)
	for _, w := range want {
		if !slices.Contains(got, w) {
			t.Errorf("%q is not among what was sent: %q", w, got)
		}
	}
	effects := 0
	for e, err := range s.client.Effects(t.Context(), point.ID) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Flow.Path == "/changed" && e.Flow.Method == http.MethodPost && e.Flow.Status == 200 {
			effects++
		}
	}
	if effects != 1 {
		t.Errorf("the checkpoint has the request that changed something %d times behind it", effects)
	}
}
