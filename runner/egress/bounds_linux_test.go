package egress_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/runner/egress"
)

// attack is a request with a header whose name says nothing but takes 360 KB of JSON.
var attack = "GET http://x.example.com/ HTTP/1.1\r\nHost: x.example.com\r\ncoppice-brokered-" + strings.Repeat("&", 60_000) + ": 1\r\n\r\n"

func (g *guest) sends(t *testing.T, request string) {
	t.Helper()
	c, err := net.Dial("tcp4", g.proxy)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(5 * time.Minute))
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); err != nil || len(b) == 0 {
		t.Fatalf("the guest was told %d bytes, %v", len(b), err)
	}
}

// next is the next batch that is not empty, within a time.
func (x *rig) next(after int64) ([]core.Flow, int64) {
	x.t.Helper()
	ctx, cancel := context.WithTimeout(x.t.Context(), 5*time.Minute)
	defer cancel()
	batch, err := x.client.Flows(ctx, after)
	if err != nil {
		x.t.Fatal(err)
	}
	return batch.Flows, batch.Last
}

// TestLongHeaderName: a guest that names a header so long that its record would be in the way of all others is told of like any other.
func TestLongHeaderName(t *testing.T) {
	x := newRig(t, func(*settings) {})
	port := site(t)
	g, other := x.guest(), x.guest()
	x.put(g, 1, "tcp://a.example.com:"+port)
	x.put(other, 1, "tcp://a.example.com:"+port)
	g.sends(t, attack)
	c, _ := connect(t, other, "a.example.com:"+port)
	c.want(t, "hello")
	_ = c.Close()
	var seen []core.SandboxID
	for after := int64(0); len(seen) < 3; {
		var list []core.Flow
		list, after = x.next(after)
		for _, f := range list {
			seen = append(seen, f.SandboxID)
			if len(f.Reason) > 1<<10 {
				t.Errorf("a reason of %d bytes", len(f.Reason))
			}
		}
	}
	if seen[0] != g.id || seen[1] != other.id || seen[2] != other.id {
		t.Errorf("told of %v", seen)
	}
	if h, err := x.client.Hello(t.Context()); err != nil || h.PID != x.pid {
		t.Errorf("the process is %+v, %v", h, err)
	}
}

// TestSpoolOfOldProcess: what a process of an older version has left, which no message takes, stops nothing, also when it is read again by the
// next one.
func TestSpoolOfOldProcess(t *testing.T) {
	x := newRig(t, func(*settings) {})
	if err := x.client.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	at := time.Now().UTC().Format(time.RFC3339)
	record := func(n int, reason string) string {
		b, err := json.Marshal(reason)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf(`{"n":%d,"flow":{"id":"f%d","sandbox_id":"sbx_1","epoch":1,"at":%q,"spoken":"http","host":"x.example","port":80,"outcome":"denied","reason":%s}}`+"\n", 99+n, n, at, b)
	}
	text := "{}\n" + record(1, strings.Repeat("&", 60_000)) + "garbage\n" + record(2, strings.Repeat("y", 3<<20)) + record(3, "as usual")
	if err := os.WriteFile(filepath.Join(x.cfg.Spool, fmt.Sprintf("flows-%020d.jsonl", 100)), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		x.start()
		var last core.Flow
		for after := int64(0); last.ID != "f3"; {
			var list []core.Flow
			list, after = x.next(after)
			last = list[len(list)-1]
		}
		st, err := x.client.Stats(t.Context())
		if err != nil || st.SetAside["too_long"] != 1 || st.SetAside["unreadable"] != 1 || st.SetAside["clipped"] != 1 {
			t.Errorf("set aside: %+v, %v", st, err)
		}
		x.kill()
	}
}

// TestDeniedFlood: what a guest has refused as fast as it can is counted, and takes next to nothing; the count is exact after a kill, too.
func TestDeniedFlood(t *testing.T) {
	const floods = 600
	x := newRig(t, func(*settings) {})
	g := x.guest()
	x.put(g, 1)
	for range floods {
		g.sends(t, "GET http://x.example.com/ HTTP/1.1\r\nHost: x.example.com\r\n\r\n")
	}
	st, err := x.client.Stats(t.Context())
	if err != nil || st.Flows[core.FlowDenied] != floods || st.SpoolBytes > 32<<10 {
		t.Errorf("stats %+v, %v", st, err)
	}
	x.kill()
	x.start()
	count, records := int64(0), 0
	for after := int64(0); count < floods; {
		var list []core.Flow
		list, after = x.next(after)
		for _, f := range list {
			count += f.Flows()
			records++
		}
	}
	if count != floods || records > 40 {
		t.Errorf("%d flows in %d records, want %d in few", count, records, floods)
	}
}

// TestLongMessages: a message that is too long is an error of that message, on either side, and the process is there as before.
func TestLongMessages(t *testing.T) {
	x := newRig(t, func(*settings) {})
	g := x.guest()
	x.put(g, 1, "a.example.com")
	long := make([]string, 20_000)
	for i := range long {
		long[i] = fmt.Sprintf("h%d.example.com", i)
	}
	err := x.client.SetRules(t.Context(), g.id, rulesOf(2, long...))
	if err == nil || strings.Contains(err.Error(), egress.ErrGone.Error()) || !strings.Contains(err.Error(), "too long") {
		t.Errorf("rules that no message takes: %v", err)
	}
	// A client that does not look.
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: egress.SocketPath(x.cfg.Dir), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, message := range []string{strings.Repeat("x", sidecar.MaxMessage+1), "no JSON", `{"op":["hello"]}`} {
		if _, err := conn.Write([]byte(message)); err != nil {
			t.Fatal(err)
		}
		var out egressapi.Response
		if _, err := sidecar.Receive(conn, &out); err != nil || out.Problem == nil {
			t.Fatalf("%.10q: %+v, %v", message, out, err)
		}
	}
	var out egressapi.Response
	if err := sidecar.Send(conn, egressapi.Request{Op: egressapi.OpHello}); err != nil {
		t.Fatal(err)
	}
	if _, err := sidecar.Receive(conn, &out); err != nil || out.Hello == nil || out.Hello.PID != x.pid {
		t.Errorf("afterwards: %+v, %v", out, err)
	}
}

// TestManyServed: any number of sandboxes is listed.
func TestManyServed(t *testing.T) {
	const many = 300
	x := newRig(t, func(*settings) {})
	for range many {
		x.put(x.guest(), 1)
	}
	list, err := x.client.List(t.Context())
	ids := map[core.SandboxID]bool{}
	for _, s := range list {
		ids[s.ID] = true
	}
	if err != nil || len(list) != many || len(ids) != many {
		t.Errorf("%d are listed, %d of them once, %v", len(list), len(ids), err)
	}
}

func rulesOf(version int64, allow ...string) runnerapi.EgressRules {
	return runnerapi.EgressRules{Version: version, Allow: allow}
}
