package daemon_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/test/testaddr"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/runner/trash"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

var long = flag.Bool("long", false, "fail over at every point, and not only at the first")

// overFailover is a database with a standby, two controllers that know both servers, and a runner.
type overFailover struct {
	*cluster
	top    *testing.T // of the whole installation
	pair   *testpg.Pair
	other  *coppice.Client // of the second controller
	second string          // its listener for runners
	runner *member
	joined []*member // other runners
	seen   *follower
	known  map[string]string // identities that sandboxes have had, and whose they are
	kept   coppice.Workspace // lives from the beginning to the end
	base   coppice.Checkpoint
}

func newOverFailover(t *testing.T, synchronous bool) *overFailover {
	t.Helper()
	f := &overFailover{top: t, pair: testpg.NewPair(t, synchronous), known: map[string]string{}}
	f.cluster = newClusterOf(t, func(cfg *daemon.ControllerConfig) { cfg.Database, cfg.AllowWeak = f.pair.DSN("postgres"), nil })
	second := f.cfg
	second.Listen, second.RunnerListen = testaddr.New(), testaddr.New()
	var ready daemon.ControllerReady
	begin(t, "controller", serverConfig{Controller: second}, &ready)
	f.other = f.connect(ready.Server)
	f.second = ready.Runners
	f.runner = f.join(f.toBoth)
	f.kept = create(t, f.client)
	f.base = f.capture(f.kept.ID)
	f.seen = follow(t, f.client)
	return f
}

// toBoth has a runner know both controllers, and leave its machines to its successor.
func (f *overFailover) toBoth(c *daemon.RunnerConfig) {
	c.Controllers, c.Leave = append(c.Controllers, f.second), true
}

func (f *overFailover) capture(id coppice.WorkspaceID) coppice.Checkpoint {
	f.t.Helper()
	cp, err := f.client.CreateCheckpoint(f.t.Context(), id, coppice.CreateCheckpointRequest{})
	if err != nil {
		f.t.Fatal(err)
	}
	return cp
}

// lose does something whose commits the standby does not get, and fails over to it. Both controllers work with it when this returns.
func (f *overFailover) lose(tail func()) {
	f.t.Helper()
	f.pair.Cut()
	tail()
	f.identities()
	f.fail()
}

func (f *overFailover) fail() {
	f.t.Helper()
	f.pair.Failover()
	for _, c := range []*coppice.Client{f.client, f.other} {
		until(f.t, "the controllers have gone over", func() (bool, error) {
			ws, err := c.CreateWorkspace(f.t.Context(), coppice.CreateWorkspaceRequest{Image: "base", Resources: coppice.ResourcesRequest{MemoryMiB: new(128)}})
			if err == nil {
				_, err = c.TerminateWorkspace(f.t.Context(), ws.ID)
			}
			return err == nil, err
		})
	}
}

// identities notes what sandboxes are, and wants none to be what another was.
func (f *overFailover) identities() {
	f.t.Helper()
	for _, row := range f.rows(`SELECT id || ' ' || unnest(ARRAY[generation, machine_id, mac]) FROM sandboxes WHERE generation IS NOT NULL`) {
		id, what, _ := strings.Cut(row, " ")
		if was, ok := f.known[what]; ok && was != id {
			f.t.Errorf("sandboxes %s and %s have both had %s", was, id, what)
		}
		f.known[what] = id
	}
}

func (f *overFailover) rows(sql string) []string {
	f.t.Helper()
	conn, err := pgx.Connect(f.t.Context(), f.pair.Primary().DSN("postgres"))
	if err != nil {
		f.t.Fatal(err)
	}
	defer func() { _ = conn.Close(f.t.Context()) }()
	rows, err := conn.Query(f.t.Context(), sql)
	if err != nil {
		f.t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		f.t.Fatal(err)
	}
	return list
}

// machines are the sandboxes that run.
func (f *overFailover) machines() []string {
	f.t.Helper()
	ids := f.runner.machines(f.t)
	for _, m := range f.joined {
		ids = append(ids, m.machines(f.t)...)
	}
	slices.Sort(ids)
	return ids
}

// machines are the sandboxes that a runner runs.
func (m *member) machines(t *testing.T) []string {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(m.cfg.RunDir, "vm", "*", "journal.json"))
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, path := range list {
		var j struct {
			Sandbox *struct {
				Info struct {
					ID string `json:"id"`
				} `json:"info"`
			} `json:"sandbox"`
		}
		b, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil || json.Unmarshal(b, &j) != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if j.Sandbox != nil {
			ids = append(ids, j.Sandbox.Info.ID)
		}
	}
	return ids
}

// whole wants everything to be as it must be after a failover: what runs is what the database knows; bytes that it does not know are in the
// trash; no identity was given twice; the workspace of the beginning has gone on; and the event stream that was open goes on.
func (f *overFailover) whole() {
	f.t.Helper()
	t := f.t
	until(t, "what runs is what the database knows", func() (bool, error) {
		rows, runs := f.rows(`SELECT id FROM sandboxes WHERE ended_at IS NULL ORDER BY id`), f.machines()
		return slices.Equal(rows, runs), fmt.Errorf("the database knows %q, and there run %q", rows, runs)
	})
	until(t, "bytes are known, or in the trash", func() (bool, error) {
		known := f.rows(`SELECT id FROM checkpoints WHERE state NOT IN ('failed', 'deleted')`)
		var dirs []os.DirEntry
		for _, m := range append([]*member{f.runner}, f.joined...) {
			list, err := os.ReadDir(checkpointsOf(t, m))
			if err != nil {
				return false, err
			}
			dirs = append(dirs, list...)
		}
		var strays []string
		for _, d := range dirs {
			if strings.HasPrefix(d.Name(), "ckpt_") && !slices.Contains(known, d.Name()) {
				strays = append(strays, d.Name())
			}
		}
		return len(strays) == 0, fmt.Errorf("the database does not know %q", strays)
	})
	until(t, "no operation is under way", func() (bool, error) {
		list := f.rows(`SELECT id || ' ' || kind FROM operations WHERE state IN ('pending', 'running')`)
		return len(list) == 0, fmt.Errorf("%q", list)
	})
	f.identities()
	echo(t, f.client, f.kept.ID)
	echo(t, f.other, f.kept.ID)
	fork, err := f.other.ForkCheckpoint(t.Context(), f.base.ID, coppice.ForkCheckpointRequest{})
	if err != nil {
		t.Fatalf("a fork of the checkpoint of the beginning: %v", err)
	}
	child := fork.Children[0].Workspace.ID
	f.seen.wants(t, "workspace.ready", child)
	if _, err := f.client.TerminateWorkspace(t.Context(), child); err != nil {
		t.Fatal(err)
	}
	f.seen.wants(t, "workspace.terminated", child)
}

// follower reads the events of the project on one stream.
type follower struct {
	// mu guards the fields below.
	mu     sync.Mutex
	events []coppice.Event
	err    error
}

func follow(t *testing.T, client *coppice.Client) *follower {
	t.Helper()
	s := &follower{}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done, ready := make(chan struct{}), make(chan struct{}, 64)
	go func() {
		defer close(done)
		for e, err := range client.Events(ctx, coppice.EventFilter{Ready: func() { ready <- struct{}{} }}) {
			s.mu.Lock()
			s.events, s.err = append(s.events, e), errors.Join(s.err, err)
			s.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		stop()
		<-done
	})
	<-ready
	return s
}

// wants waits for an event of a workspace, and wants it once.
func (s *follower) wants(t *testing.T, kind string, id coppice.WorkspaceID) {
	t.Helper()
	until(t, "an event "+kind, func() (bool, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		n := 0
		for _, e := range s.events {
			if e.Type == kind && e.WorkspaceID == id {
				n++
			}
		}
		if n > 1 {
			t.Errorf("event %s of %s came %d times", kind, id, n)
		}
		return n > 0, s.err
	})
}

// registerAgain makes the database forget the last heartbeats, so that the runner registers again, and waits for that.
func (f *overFailover) registerAgain() {
	f.t.Helper()
	epoch := func() int64 { return f.pair.Number(f.pair.Primary(), `SELECT max(lease_epoch) FROM runners`) }
	before := epoch()
	f.pair.SQL(f.pair.Primary(), `UPDATE runners SET beat = 0`)
	until(f.t, "the runner has registered again", func() (bool, error) { return epoch() > before, nil })
}

// held has a controller stop when the runner has done its part of an operation, cuts the standby off, and lets the controller go on: the end of
// the operation is lost, and its beginning is not.
func (f *overFailover) held(do func() error) {
	f.t.Helper()
	f.stop(f.t)
	t := f.t
	f.t, f.points = f.top, "controller.before_end=stop" // it lives longer than this point
	f.start()
	f.t, f.points = t, ""
	done := make(chan error, 1)
	go func() { done <- do() }()
	until(f.t, "the controller has stopped", func() (bool, error) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", f.cmd.Process.Pid))
		return err == nil && strings.HasPrefix(string(b[strings.LastIndexByte(string(b), ')')+1:]), " T"), err
	})
	f.pair.Cut()
	if err := f.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		f.t.Fatal(err)
	}
	if err := <-done; err != nil {
		f.t.Fatal(err)
	}
	f.identities()
	f.fail()
}

func (f *overFailover) state(id coppice.WorkspaceID) (coppice.WorkspaceState, error) {
	ws, err := f.other.Workspace(f.t.Context(), id)
	return ws.State, err
}

// checkpoints is the directory that has the runner's checkpoints.
func (f *overFailover) checkpoints() string {
	f.t.Helper()
	return checkpointsOf(f.t, f.runner)
}

func checkpointsOf(t *testing.T, m *member) string {
	t.Helper()
	return filepath.Join(filepath.Dir(trashOf(t, m)), "checkpoints")
}

// trash is the directory that has the runner's trash.
func (f *overFailover) trash() string {
	f.t.Helper()
	return trashOf(f.t, f.runner)
}

func trashOf(t *testing.T, m *member) string {
	t.Helper()
	dir, err := daemon.TrashDir(m.cfg.Runner.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func (f *overFailover) inTrash(id coppice.CheckpointID) (*trash.Entry, error) {
	return entryIn(f.trash(), id)
}

func entryIn(dir string, id coppice.CheckpointID) (*trash.Entry, error) {
	list, err := trash.List(dir)
	for _, e := range list {
		if e.ID == core.CheckpointID(id) {
			return &e, err
		}
	}
	return nil, err
}

// failoverPoints are what the lost tail has, and what must follow.
var failoverPoints = []struct {
	name string
	do   func(*testing.T, *overFailover)
}{
	{"a checkpoint", func(t *testing.T, f *overFailover) {
		t.Helper()
		var cp coppice.Checkpoint
		f.lose(func() { cp = f.capture(f.kept.ID) })
		until(t, "the bytes are in the trash", func() (bool, error) {
			e, err := f.inTrash(cp.ID)
			return e != nil, err
		})
		_, err := f.client.Checkpoint(t.Context(), cp.ID)
		wantCode(t, err, core.CodeCheckpointNotFound)
		if err := trash.Keep(f.trash(), core.CheckpointID(cp.ID)); err != nil {
			t.Error(err)
		}
		f.whole()
		if e, err := f.inTrash(cp.ID); e == nil || !e.Kept {
			t.Errorf("the checkpoint that was kept is %+v, %v", e, err)
		}
	}},
	{"a registration", func(t *testing.T, f *overFailover) {
		t.Helper()
		before := f.machines()
		f.lose(f.registerAgain)
		f.whole()
		if after := f.machines(); !slices.Equal(before, after) {
			t.Errorf("there ran %q, and now run %q", before, after)
		}
	}},
	{"a workspace that became ready", func(t *testing.T, f *overFailover) {
		t.Helper()
		var ws coppice.Workspace
		f.lose(func() { ws = create(t, f.client) })
		_, err := f.client.Workspace(t.Context(), ws.ID)
		wantCode(t, err, core.CodeWorkspaceNotFound)
		f.whole()
	}},
	{"the completion of a creation", func(t *testing.T, f *overFailover) {
		t.Helper()
		var ws coppice.Workspace
		f.held(func() error {
			var err error
			ws, err = f.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Image: "base", Resources: coppice.ResourcesRequest{MemoryMiB: new(128)}})
			return err
		})
		until(t, "it is ready, or has ended with a cause", func() (bool, error) {
			now, err := f.other.Workspace(t.Context(), ws.ID)
			return now.State == coppice.WorkspaceReady || now.Failure != nil, err
		})
		f.whole()
	}},
	{"the completion of a capture", func(t *testing.T, f *overFailover) {
		t.Helper()
		var cp coppice.Checkpoint
		f.held(func() error {
			var err error
			cp, err = f.client.CreateCheckpoint(t.Context(), f.kept.ID, coppice.CreateCheckpointRequest{})
			return err
		})
		until(t, "it can be forked", func() (bool, error) {
			fork, err := f.other.ForkCheckpoint(t.Context(), cp.ID, coppice.ForkCheckpointRequest{})
			if err == nil {
				_, err = f.client.TerminateWorkspace(t.Context(), fork.Children[0].Workspace.ID)
			}
			return err == nil, err
		})
		f.whole()
	}},
	{"a release", func(t *testing.T, f *overFailover) {
		t.Helper()
		ws := create(t, f.client)
		f.lose(func() {
			if _, err := f.client.TerminateWorkspace(t.Context(), ws.ID); err != nil {
				t.Fatal(err)
			}
		})
		until(t, "the workspace that has no machine is lost", func() (bool, error) {
			state, err := f.state(ws.ID)
			return state == coppice.WorkspaceLost, fmt.Errorf("%s: %w", state, err)
		})
		f.whole()
	}},
	{"a restore in place", func(t *testing.T, f *overFailover) {
		t.Helper()
		ws := create(t, f.client)
		cp := f.capture(ws.ID)
		f.lose(func() {
			if _, err := f.client.RestoreWorkspace(t.Context(), ws.ID, cp.ID); err != nil {
				t.Fatal(err)
			}
		})
		until(t, "the workspace that has no machine is lost", func() (bool, error) {
			state, err := f.state(ws.ID)
			return state == coppice.WorkspaceLost, fmt.Errorf("%s: %w", state, err)
		})
		f.whole()
	}},
	{"a deletion", func(t *testing.T, f *overFailover) {
		t.Helper()
		cp := f.capture(f.kept.ID)
		f.lose(func() {
			if err := f.client.DeleteCheckpoint(t.Context(), cp.ID); err != nil {
				t.Fatal(err)
			}
			until(t, "the bytes are gone", func() (bool, error) {
				_, err := os.Stat(filepath.Join(f.checkpoints(), cp.ID))
				return errors.Is(err, os.ErrNotExist), err
			})
		})
		until(t, "a fork of the checkpoint without bytes is refused", func() (bool, error) {
			_, err := f.other.ForkCheckpoint(t.Context(), cp.ID, coppice.ForkCheckpointRequest{})
			return errors.Is(err, coppice.CodeCheckpointNotFound), err
		})
		f.whole()
	}},
	{"a runner that joined", joinedInTheTail},
	{"the removal of a runner", removedInTheTail},
	{"the joining and the removal of a runner", joinedAndRemovedInTheTail},
}

// TestFailover loses the last commits of an asynchronous primary, and goes on with its standby, again and again in one installation.
// Machines that the database does not know are ended, and bytes that it does not know go to the trash.
func TestFailover(t *testing.T) { //nolint:tparallel // one installation, one failover after the other
	t.Parallel()
	f := newOverFailover(t, false)
	for i, p := range failoverPoints {
		if i > 0 && !*long {
			break
		}
		began := time.Now()
		if !t.Run(p.name, func(t *testing.T) {
			outer := f.t
			f.t = t
			defer func() { f.t = outer }()
			if f.pair.Standby() == nil {
				f.pair.AddStandby()
			}
			p.do(t, f)
		}) {
			return // what follows would begin with what is broken
		}
		t.Logf("%s: %.1f s", p.name, time.Since(began).Seconds())
	}
}

// TestSynchronousFailover kills the primary of a synchronous standby while workspaces and checkpoints are made, and wants everything that was
// acknowledged to be there. Then the old primary comes back, as the first server of the address: nothing is written there.
func TestSynchronousFailover(t *testing.T) {
	t.Parallel()
	f := newOverFailover(t, true)
	ctx, stop := context.WithCancel(t.Context())
	var writer sync.WaitGroup
	var acked []coppice.Checkpoint
	enough := make(chan struct{}, 1)
	writer.Go(func() {
		for ctx.Err() == nil {
			cp, err := f.client.CreateCheckpoint(ctx, f.kept.ID, coppice.CreateCheckpointRequest{})
			if err != nil {
				continue // whether it was made is not known
			}
			if acked = append(acked, cp); len(acked) == 3 {
				enough <- struct{}{}
			}
		}
	})
	select {
	case <-enough:
	case <-time.After(watchdog):
		t.Fatal("no three checkpoints were made")
	}
	f.identities()
	f.fail()
	stop()
	writer.Wait()
	for _, cp := range acked {
		if got, err := f.other.Checkpoint(t.Context(), cp.ID); err != nil || got.State == coppice.CheckpointFailed {
			t.Errorf("checkpoint %s was acknowledged, and is %+v, %v", cp.ID, got, err)
		}
	}
	f.whole()
	list, err := trash.List(f.trash())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		if slices.ContainsFunc(acked, func(cp coppice.Checkpoint) bool { return core.CheckpointID(cp.ID) == e.ID }) {
			t.Errorf("checkpoint %s was acknowledged, and is in the trash", e.ID)
		}
	}

	f.pair.Return()
	f.pair.SQL(f.pair.Primary(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'coppice-controller'`)
	var ws coppice.Workspace
	until(t, "the controllers work", func() (bool, error) {
		ws, err = f.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Image: "base", Resources: coppice.ResourcesRequest{MemoryMiB: new(128)}})
		return err == nil, err
	})
	if n := f.pair.Number(f.pair.Primary(), `SELECT count(*) FROM workspaces WHERE id = $1`, ws.ID); n != 1 {
		t.Error("a workspace was made in the old primary")
	}
	log, err := os.ReadFile(f.log)
	if err != nil || !strings.Contains(string(log), "database server passed over") {
		t.Errorf("the log does not say that the old primary was passed over: %v", err)
	}
	f.whole()
}
