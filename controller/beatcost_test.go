package controller_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/api/runnerapi/beats"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// populate makes the one workspace and checkpoint of a runner many, and returns what the runner holds.
func populate(t *testing.T, w *world, sandboxes, checkpoints int) (held []runnerapi.Sandbox, ids []core.CheckpointID) {
	t.Helper()
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	w.sql(fmt.Sprintf(`SET session_replication_role = replica;
		INSERT INTO workspaces SELECT (jsonb_populate_record(w, jsonb_build_object('id', 'ws_' || n, 'name', 'n' || n, 'sandbox_id', 'sbx_' || n))).*
			FROM workspaces w, generate_series(1, %d) AS n;
		INSERT INTO sandboxes (id, project_id, workspace_id, epoch, runner_id, vcpus, memory_mib, generation, hostname, machine_id, tree_id, mac, ip)
			SELECT 'sbx_' || n, project_id, 'ws_' || n, 1, runner_id, 1, 512, 'gen_' || n, 'h' || n, md5(n::text), 'ws_' || n, '02:00:00:00:' || lpad(to_hex(n / 256), 2, '0') || ':' || lpad(to_hex(n %% 256), 2, '0'), '10.9.' || n / 256 || '.' || n %% 256
			FROM sandboxes, generate_series(1, %d) AS n WHERE id = '%s';
		INSERT INTO checkpoints SELECT (jsonb_populate_record(c, jsonb_build_object('id', 'ckpt_' || n, 'name', NULL))).*
			FROM checkpoints c, generate_series(1, %d) AS n WHERE id = '%s'`, sandboxes-1, sandboxes-1, ws.Sandbox.ID, checkpoints-1, cp.ID))
	held = w.runner.Sandboxes()
	for n := 1; n < sandboxes; n++ {
		s := held[0]
		s.ID, s.WorkspaceID = core.SandboxID(fmt.Sprint("sbx_", n)), core.WorkspaceID(fmt.Sprint("ws_", n))
		held = append(held, s)
	}
	ids = w.runner.Checkpoints()
	for n := 1; n < checkpoints; n++ {
		ids = append(ids, core.CheckpointID(fmt.Sprint("ckpt_", n)))
	}
	return held, ids
}

// countedStore is a store of the world's database that counts the bytes between the two.
func countedStore(t *testing.T, w *world) (store *postgres.Store, bytes *atomic.Int64) {
	t.Helper()
	cfg, err := pgx.ParseConfig(w.dsn)
	if err != nil {
		t.Fatal(err)
	}
	network, database := pgconn.NetworkAddress(cfg.Host, cfg.Port)
	address, err := url.Parse(w.dsn)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	bytes = new(atomic.Int64)
	var group sync.WaitGroup
	pass := func(to, from net.Conn) {
		_, _ = io.Copy(to, io.TeeReader(from, counter{bytes})) // until one of them ends
		_, _ = to.Close(), from.Close()
	}
	group.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial(network, database)
			if err != nil {
				_ = client.Close()
				continue
			}
			group.Go(func() { pass(client, server) })
			group.Go(func() { pass(server, client) })
		}
	})
	t.Cleanup(group.Wait) // the store is closed before
	t.Cleanup(func() { _ = listener.Close() })
	host, port, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	q := address.Query()
	q.Set("host", host)
	q.Set("port", port)
	address.RawQuery = q.Encode()
	return openStore(t, address.String()), bytes
}

type counter struct{ n *atomic.Int64 }

func (c counter) Write(b []byte) (int, error) {
	c.n.Add(int64(len(b)))
	return len(b), nil
}

// TestBeatCost compares a heartbeat that names everything with one without a difference: what the runner sends, and what the controller
// and the database say to each other.
func TestBeatCost(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.LoopInterval = time.Hour })
	held, ids := populate(t, w, 200, 2000)
	store, bytes := countedStore(t, w)
	c, _ := w.startOn(store, controller.Config{AllowAllEgress: true, LoopInterval: time.Hour})
	var sender beats.Sender
	sender.Registered(w.epoch)
	send := func(whole bool) (sent, asked int64) {
		t.Helper()
		if whole {
			sender.Unanswered()
		}
		b := sender.Begin()
		b.Info, b.Sandboxes, b.Checkpoints = w.runner.Info(), held, ids
		m := sender.Make(b)
		if whole == (m.Differences != nil) {
			t.Fatalf("heartbeat %d is of the other kind", b.Number)
		}
		before, body := bytes.Load(), any(b)
		var out runnerapi.Heartbeated
		var err error
		if whole {
			out, err = c.Fleet().Heartbeat(t.Context(), w.runner.ID(), b)
		} else {
			body = m.Differences
			out, err = c.Fleet().Beat(t.Context(), w.runner.ID(), *m.Differences)
		}
		if err != nil || out.AllSandboxes || out.AllCheckpoints || len(out.DropSandboxes)+len(out.DropCheckpoints)+len(out.StrayCheckpoints)+len(out.Unsettled) > 0 {
			t.Fatalf("%+v, %v", out, err)
		}
		asked = bytes.Load() - before
		sender.Answered(m, out)
		text, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		return int64(len(text)), asked
	}
	sent, asked := map[bool]int64{}, map[bool]int64{}
	// The first heartbeats also prepare statements, and other loops may ask at the same time. So the smallest figure counts.
	for i := range 5 {
		for _, whole := range []bool{true, false} {
			body, asks := send(whole)
			if sent[whole] = body; i == 0 || asks < asked[whole] {
				asked[whole] = asks
			}
		}
	}
	t.Logf("200 sandboxes, 2000 checkpoints: whole %d bytes, and %d between controller and database; differences %d and %d",
		sent[true], asked[true], sent[false], asked[false])
	if most := int64(16 << 10); sent[false] > most || asked[false] > most {
		t.Errorf("a heartbeat without a difference has %d bytes, and controller and database say %d to each other; at most %d are expected", sent[false], asked[false], most)
	}
	if sent[false]*20 > sent[true] || asked[false]*20 > asked[true] {
		t.Errorf("a heartbeat without a difference has %d bytes, and controller and database say %d to each other; for one that names everything these are %d and %d",
			sent[false], asked[false], sent[true], asked[true])
	}
}
