package controller_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/api/runnerapi/beats"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/fleet"
	"github.com/coppice-dev/coppice/core"
)

// beatStorm is a runner whose heartbeats go through a network that loses, repeats, delays and reorders them, to two controllers.
type beatStorm struct {
	*world
	rnd         *rand.Rand
	controllers []*controller.Controller
	sender      beats.Sender
	late        []beats.Message           // that may arrive yet, or again
	newest      int64                     // number that was applied
	gone        map[core.WorkspaceID]bool // whose machine crashed or vanished
	alive       map[core.WorkspaceID]controller.Workspace
	ended       map[core.WorkspaceID]bool
	cps         []core.CheckpointID
	deleted     map[core.CheckpointID]bool
}

func (s *beatStorm) collect() beats.Message {
	b := s.sender.Begin()
	b.Info, b.Sandboxes, b.Checkpoints, b.Fetching = s.runner.Info(), s.runner.Sandboxes(), s.runner.Checkpoints(), s.fetching
	return s.sender.Make(b)
}

// arrive has a message reach one of the controllers. The model says whether it counts.
func (s *beatStorm) arrive(m beats.Message) (out runnerapi.Heartbeated, ok bool) {
	s.t.Helper()
	c := s.controllers[s.rnd.IntN(len(s.controllers))]
	var err error
	if m.Differences != nil {
		out, err = c.Fleet().Beat(s.t.Context(), s.runner.ID(), *m.Differences)
	} else {
		out, err = c.Fleet().Heartbeat(s.t.Context(), s.runner.ID(), m.Whole)
	}
	n := m.Whole.Number
	if n <= s.newest {
		if core.CodeOf(err) != core.CodeHeartbeatStale {
			s.t.Fatalf("heartbeat %d after %d: %v", n, s.newest, err)
		}
		return out, false
	}
	if err != nil {
		s.t.Fatalf("heartbeat %d after %d: %v", n, s.newest, err)
	}
	s.newest = n
	for _, id := range out.DropSandboxes {
		for _, ws := range s.alive {
			if ws.Sandbox.ID == id && !s.gone[ws.ID] {
				s.t.Fatalf("told to end the sandbox of workspace %s, which lives", ws.ID)
			}
		}
	}
	for _, id := range out.DropCheckpoints {
		if !s.deleted[id] {
			s.t.Fatalf("told to delete checkpoint %s, which was not deleted", id)
		}
	}
	if len(out.StrayCheckpoints) > 0 {
		s.t.Fatalf("the database does not know %v", out.StrayCheckpoints)
	}
	return out, true
}

func (s *beatStorm) answer(m beats.Message, out runnerapi.Heartbeated) (again bool) {
	again = s.sender.Answered(m, out)
	s.runner.Obey(m.Whole, out)
	return again
}

func (s *beatStorm) send() {
	m := s.collect()
	switch s.rnd.IntN(8) {
	case 0: // lost
		s.sender.Unanswered()
	case 1, 2: // late: the runner gives it up, and things go on
		s.late = append(s.late, m)
		s.sender.Unanswered()
		if s.rnd.IntN(2) == 0 { // the next one is collected before the late one arrives
			next := s.collect()
			s.change()
			s.arrive(m)
			if out, ok := s.arrive(next); ok {
				s.answer(next, out)
			}
		}
	case 3: // the answer is lost
		s.arrive(m)
		s.late = append(s.late, m)
		s.sender.Unanswered()
	default:
		if s.rnd.IntN(3) == 0 {
			s.change()
		}
		if out, ok := s.arrive(m); ok {
			s.answer(m, out)
		} else {
			s.sender.Unanswered()
		}
		if s.rnd.IntN(3) == 0 {
			s.late = append(s.late, m)
		}
	}
}

// change is something that happens beside heartbeats.
func (s *beatStorm) change() {
	s.t.Helper()
	ready := make([]controller.Workspace, 0, len(s.alive))
	for id, ws := range s.alive {
		if !s.gone[id] {
			ready = append(ready, ws)
		}
	}
	slices.SortFunc(ready, func(a, b controller.Workspace) int { return slices.Compare([]byte(a.ID), []byte(b.ID)) })
	pick := func() controller.Workspace { return ready[s.rnd.IntN(len(ready))] }
	switch n := s.rnd.IntN(8); {
	case n <= 1 || len(ready) == 0:
		ws := s.create("")
		s.alive[ws.ID] = ws
	case n == 2:
		s.cps = append(s.cps, s.checkpoint(pick().ID).ID)
	case n == 3 && len(s.cps) > 0:
		id := s.cps[s.rnd.IntN(len(s.cps))]
		if s.DeleteCheckpoint(s.t.Context(), s.project, id) == nil {
			s.deleted[id] = true
		}
	case n == 4:
		ws := pick()
		s.runner.Crash(ws.Sandbox.ID, "killed")
		s.gone[ws.ID] = true
	case n == 5:
		ws := pick()
		s.runner.Vanish(ws.Sandbox.ID)
		s.gone[ws.ID] = true
	case n == 6:
		ws := pick()
		if _, err := s.Terminate(s.t.Context(), s.project, ws.ID, wait); err != nil {
			s.t.Fatal(err)
		}
		delete(s.alive, ws.ID)
		s.ended[ws.ID] = true
	default:
		s.runner.Stall(pick().Sandbox.ID, []*runnerapi.Stall{nil, {Since: time.Now(), Problem: runnerapi.Problem{Code: core.CodeStoreUnavailable}}}[s.rnd.IntN(2)])
	}
}

// settle is a time without faults: the rows come to say what the runner has.
func (s *beatStorm) settle() {
	s.t.Helper()
	for _, m := range s.late {
		s.arrive(m)
	}
	s.late = nil
	for range 3 * fleet.SumEvery {
		m := s.collect()
		out, ok := s.arrive(m)
		if !ok {
			s.t.Fatalf("a new heartbeat was not applied: %+v", m.Whole.Number)
		}
		s.answer(m, out)
	}
	m := s.collect()
	out, _ := s.arrive(m)
	if m.Differences == nil || out.AllSandboxes || out.AllCheckpoints || len(m.Differences.Sandboxes)+len(m.Differences.Checkpoints)+len(m.Differences.GoneCheckpoints) > 0 {
		s.t.Errorf("no rest: %+v, %+v", m.Differences, out)
	}
	s.answer(m, out)
	for id := range s.alive {
		want := core.WorkspaceReady
		if s.gone[id] {
			want = core.WorkspaceLost
		}
		if got := s.state(id); got != want {
			s.t.Errorf("workspace %s is %s, want %s", id, got, want)
		}
	}
	stalled := 0
	for _, sb := range s.runner.Sandboxes() {
		if sb.Stalled != nil {
			stalled++
		}
	}
	if n := s.number(`SELECT count(*) FROM sandboxes WHERE stalled_at IS NOT NULL AND ended_at IS NULL`); n != stalled {
		s.t.Errorf("%d sandboxes are recorded as stalled, %d are", n, stalled)
	}
	held := s.runner.Checkpoints()
	for _, id := range held {
		if s.deleted[id] {
			s.t.Errorf("the runner still has checkpoint %s, which was deleted", id)
		}
	}
	if n := s.number(`SELECT count(*) FROM checkpoint_copies WHERE runner_id = $1`, s.runner.ID()); n != len(held) {
		s.t.Errorf("%d copies are recorded, the runner has %d", n, len(held))
	}
}

// TestBeatsInAnyOrder compares what heartbeats do in any order, any number of times and with any loss with a model of the runner.
func TestBeatsInAnyOrder(t *testing.T) {
	t.Parallel()
	for range 3 {
		seed := rand.Uint64()
		t.Run("", func(t *testing.T) {
			t.Parallel()
			t.Logf("seed %d", seed)
			w := newWorld(t)
			second, _ := w.start(controller.Config{ClusterID: "test", AllowAllEgress: true, LoopInterval: 50 * time.Millisecond})
			s := &beatStorm{
				world: w, rnd: rand.New(rand.NewPCG(seed, 1)), controllers: []*controller.Controller{w.Controller, second},
				gone: map[core.WorkspaceID]bool{}, alive: map[core.WorkspaceID]controller.Workspace{}, ended: map[core.WorkspaceID]bool{}, deleted: map[core.CheckpointID]bool{},
			}
			s.sender.Registered(w.epoch)
			for range 4 {
				for range 30 {
					switch n := s.rnd.IntN(5); {
					case n == 0:
						s.change()
					case n == 1 && len(s.late) > 0:
						s.arrive(s.late[s.rnd.IntN(len(s.late))])
					default:
						s.send()
					}
				}
				s.settle()
			}
		})
	}
}
