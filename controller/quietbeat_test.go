package controller_test

import (
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// TestQuietHeartbeatsShareACommit sends the quiet heartbeats of many runners at once. Then one of them has a text that PostgreSQL refuses, and one
// is repeated: all others count, and each gets the answer that it would have got alone.
func TestQuietHeartbeatsShareACommit(t *testing.T) {
	t.Parallel()
	const runners = 20
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) {
		c.RunnerLease, c.LoopInterval = 2*time.Minute, time.Hour // batches wait for 100 ms; nothing else commits
	})
	beats := make([]runnerapi.Beat, runners)
	for i := range beats {
		info := w.runner.Info()
		info.RunnerID = core.NewID[core.RunnerID]()
		got, err := w.Fleet().Register(t.Context(), runnerapi.Register{Info: info, Endpoint: "http://127.0.0.1:1"})
		if err != nil {
			t.Fatal(err)
		}
		beats[i].Heartbeat = runnerapi.Heartbeat{LeaseEpoch: got.LeaseEpoch, Number: 1, Info: info}
		if _, err := w.Fleet().Heartbeat(t.Context(), info.RunnerID, beats[i].Heartbeat); err != nil {
			t.Fatal(err)
		}
		beats[i].Number, beats[i].Answered = 2, 1
	}
	send := func(each func(i int, out runnerapi.Heartbeated, err error)) {
		var all sync.WaitGroup
		for i := range beats {
			all.Go(func() {
				out, err := w.Fleet().Beat(t.Context(), beats[i].Info.RunnerID, beats[i])
				each(i, out, err)
			})
		}
		all.Wait()
	}
	want := func(i int, out runnerapi.Heartbeated, err error) {
		if err != nil || out.Number != beats[i].Number || out.AllSandboxes || out.AllCheckpoints || out.TTLSeconds != 120 || out.FenceSeconds <= 0 {
			t.Errorf("heartbeat of runner %d: %+v, %v", i, out, err)
		}
	}
	writers := func() int { // the transactions whose writes are in the rows
		return w.number(`SELECT count(DISTINCT xmin::text) FROM runners WHERE beat = $1`, beats[0].Number)
	}
	send(want)
	if n := writers(); n > runners/2 { // on a slow machine they come in several batches; alone, each has a transaction of its own
		t.Errorf("%d heartbeats took %d transactions", runners, n)
	}

	const bad = 7
	for i := range beats {
		beats[i].Number, beats[i].Answered = 3, 2
	}
	beats[bad].Info.KVM = "not\x00text"
	send(func(i int, out runnerapi.Heartbeated, err error) {
		if i != bad {
			want(i, out, err)
		} else if err == nil {
			t.Error("a heartbeat with a zero byte was applied")
		}
	})

	// One that was repeated is refused, together with others as alone.
	beats[bad].Info.KVM, beats[bad].Answered = beats[0].Info.KVM, 1
	for i := range beats {
		if beats[i].Number = 4; i != bad {
			beats[i].Answered = 3
		}
	}
	beats[bad].Number, beats[bad].Answered = 2, 1
	send(func(i int, out runnerapi.Heartbeated, err error) {
		if i != bad {
			want(i, out, err)
		} else {
			wantCode(t, err, core.CodeHeartbeatStale)
		}
	})
}
