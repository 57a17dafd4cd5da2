package controller_test

import (
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/api/runnerapi/beats"
	"github.com/coppice-dev/coppice/controller/fleet"
	"github.com/coppice-dev/coppice/core"
)

// TestBeatSentTwice: a heartbeat that arrives again, after a workspace has become ready, settles nothing.
func TestBeatSentTwice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.beat()
	old := w.runner.NextBeat(w.epoch)
	ws := w.create("main")
	if _, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), old); err != nil {
		t.Fatal(err)
	}
	_, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), old)
	wantCode(t, err, core.CodeHeartbeatStale)
	if got := w.state(ws.ID); got != core.WorkspaceReady {
		t.Errorf("after a repeated heartbeat the workspace is %s", got)
	}
}

// TestBeatsAreNotAudited: heartbeats write no records of their runner, and one for each write by pass.
func TestBeatsAreNotAudited(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws, key := w.create("main"), w.admin().ID
	w.beat()
	before := w.number(`SELECT count(*) FROM audit_records WHERE object_id = $1`, w.runner.ID())
	for n := range int64(3) {
		beat := w.runner.NextBeat(w.epoch)
		beat.DataLog = "log"
		beat.DataWrites = []runnerapi.DataWrite{{Number: n + 1, RequestID: "a", SandboxID: ws.Sandbox.ID, KeyID: key, Path: "/a", At: time.Now()}}
		out, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), beat)
		if err != nil {
			t.Fatal(err)
		}
		w.runner.Obey(beat, out)
	}
	if after := w.number(`SELECT count(*) FROM audit_records WHERE object_id = $1`, w.runner.ID()); after != before {
		t.Errorf("3 heartbeats have written %d audit records of the runner", after-before)
	}
	if n := w.number(`SELECT count(*) FROM audit_records WHERE action = 'putFile'`); n != 3 {
		t.Errorf("3 writes are %d records", n)
	}
}

// TestBeatNumbers: numbers that no runner counts up to are refused, and an epoch near the end of the column does not become one.
func TestBeatNumbers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, h := range []runnerapi.Heartbeat{
		{Number: -1}, {Number: 1 << 54}, {Number: 1, Answered: -1}, {Number: 2, Answered: 2},
	} {
		h.LeaseEpoch, h.Info = w.epoch, w.runner.Info()
		_, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), h)
		wantCode(t, err, core.CodeInvalidField)
	}
	_, err := w.Fleet().Beat(t.Context(), w.runner.ID(), runnerapi.Beat{Heartbeat: runnerapi.Heartbeat{LeaseEpoch: w.epoch, Info: w.runner.Info()}})
	wantCode(t, err, core.CodeInvalidField)
	reg := runnerapi.Register{Info: w.runner.Info(), Endpoint: w.runner.Endpoint(), LeaseEpoch: 1<<63 - 1}
	if out, err := w.Fleet().Register(t.Context(), reg); err != nil || out.LeaseEpoch != 1<<53+1 {
		t.Errorf("%+v, %v", out, err)
	}
	reg.LeaseEpoch = 0
	if out, err := w.Fleet().Register(t.Context(), reg); err != nil || out.LeaseEpoch != 1<<53+2 {
		t.Errorf("%+v, %v", out, err)
	}
}

// differences makes a heartbeat one with differences in which nothing is different.
func differences(h runnerapi.Heartbeat) runnerapi.Beat {
	b := runnerapi.Beat{Heartbeat: h, CheckpointSum: beats.Sum(h.Checkpoints...)}
	for _, s := range h.Sandboxes {
		b.SandboxSum ^= beats.Sum(s.ID)
	}
	b.Sandboxes, b.Checkpoints = nil, nil
	return b
}

// TestOldControllerBetween: a controller of an older version has applied a heartbeat that has no number. What comes next settles nothing, and
// its differences are to something else.
func TestOldControllerBetween(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	for range 2 {
		w.beat()
	}
	const byOld = `UPDATE runners SET heartbeat_at = now(), lease_expires_at = now() + interval '1 hour'`
	w.sql(byOld)
	if out, err := w.Fleet().Beat(t.Context(), w.runner.ID(), differences(w.runner.NextBeat(w.epoch))); err != nil || !out.AllSandboxes || !out.AllCheckpoints {
		t.Errorf("differences to what an older controller has not seen: %+v, %v", out, err)
	}
	w.beat()
	w.sql(byOld)
	missing := w.runner.NextBeat(w.epoch)
	missing.Sandboxes = nil
	if _, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), missing); err != nil {
		t.Fatal(err)
	}
	if got := w.state(ws.ID); got != core.WorkspaceReady {
		t.Errorf("after a heartbeat that settles nothing the workspace is %s", got)
	}
}

// TestOldRunner: the heartbeats of a runner of an older version have no number. One may be a minute old when it arrives, so that it settles
// what was ready a minute before the previous one.
func TestOldRunner(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	for _, c := range []struct {
		ready string
		want  core.WorkspaceState
	}{{"59 s", core.WorkspaceReady}, {"61 s", core.WorkspaceLost}} {
		w.sql(`UPDATE workspaces SET ready_at = (SELECT heartbeat_at FROM runners) - $1::interval`, c.ready)
		if _, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), runnerapi.Heartbeat{LeaseEpoch: w.epoch, Info: w.runner.Info()}); err != nil {
			t.Fatal(err)
		}
		if got := w.state(ws.ID); got != c.want {
			t.Errorf("ready %s before the previous heartbeat, and missing, the workspace is %s, want %s", c.ready, got, c.want)
		}
	}
}

// TestAnsweredAhead: the database has lost heartbeats whose answers the runner had. The runner registers again.
func TestAnsweredAhead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for range 3 {
		w.beat()
	}
	w.sql(`UPDATE runners SET beat = 2`)
	_, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), w.runner.NextBeat(w.epoch))
	wantCode(t, err, core.CodeStateConflict)
	w.register()
	w.beat()
}

// TestUseInDifferences: a workspace was used through the data plane, and nothing else of it has changed.
func TestUseInDifferences(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	w.beat()
	w.sql(`DELETE FROM workspace_uses`)
	b := differences(w.runner.NextBeat(w.epoch))
	b.DataUsed = []core.WorkspaceID{ws.ID}
	if out, err := w.Fleet().Beat(t.Context(), w.runner.ID(), b); err != nil || out.AllSandboxes {
		t.Fatalf("%+v, %v", out, err)
	}
	eventually(t, "the use is recorded", func() bool {
		return w.number(`SELECT count(*) FROM workspace_uses WHERE workspace_id = $1`, ws.ID) == 1
	})
}

// TestOneListAgain: only the list whose checksum differs is asked for, and it is taken beside differences of the other.
func TestOneListAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	lost, stays := w.create("lost"), w.create("stays")
	unsummed := func() int { return w.number(`SELECT count(*) FROM checkpoint_copies WHERE id_sum IS NULL`) }
	w.checkpoint(stays.ID)
	if n := unsummed(); n != 0 { // each heartbeat would have to hash their ids
		t.Errorf("after a capture %d copies have no sum", n)
	}
	w.beat()
	copies := func() int { return w.number(`SELECT count(*) FROM checkpoint_copies`) }
	held := copies()
	send := func(sandboxes, checkpoints bool, change func(*runnerapi.Beat)) {
		t.Helper()
		h := w.runner.NextBeat(w.epoch)
		b := differences(h)
		change(&b)
		out, err := w.Fleet().Beat(t.Context(), w.runner.ID(), b)
		if err != nil || out.AllSandboxes != sandboxes || out.AllCheckpoints != checkpoints {
			t.Errorf("asked for all sandboxes: %v, want %v; for all checkpoints: %v, want %v (%v)", out.AllSandboxes, sandboxes, out.AllCheckpoints, checkpoints, err)
		}
		out.AllSandboxes, out.AllCheckpoints = false, false
		w.runner.Obey(h, out)
	}
	same := func(*runnerapi.Beat) {}
	// compared skips numbers until the checksums of the next heartbeat are compared.
	compared := func() {
		t.Helper()
		for w.runner.NextBeat(w.epoch).Number%fleet.SumEvery != fleet.SumEvery-1 {
		}
	}
	send(false, false, same)
	compared()
	send(false, false, same)
	w.sql(`DELETE FROM checkpoint_copies`)
	send(false, false, same) // the checksums were compared just now
	compared()
	send(false, true, same)
	send(false, false, func(b *runnerapi.Beat) {
		b.AllCheckpoints, b.Checkpoints, b.CheckpointSum = true, w.runner.Checkpoints(), 0
	})
	if n := copies(); n != held {
		t.Errorf("%d copies are recorded, want %d", n, held)
	}
	// Copies that a controller of before has recorded have no sums.
	if n := unsummed(); n != 0 {
		t.Errorf("%d copies have no sum", n)
	}
	w.sql(`UPDATE checkpoint_copies SET id_sum = NULL`)
	compared()
	send(false, false, same)
	w.beat()
	if n := unsummed(); n != 0 {
		t.Errorf("after a whole list %d copies have no sum", n)
	}
	w.runner.Vanish(lost.Sandbox.ID)
	compared()
	send(true, false, same)
	if got := w.state(lost.ID); got != core.WorkspaceReady {
		t.Errorf("by a checksum alone the workspace is %s", got)
	}
	send(false, false, func(b *runnerapi.Beat) { b.AllSandboxes, b.Sandboxes = true, w.runner.Sandboxes() })
	if got := w.state(lost.ID); got != core.WorkspaceLost {
		t.Errorf("missing in the whole list, the workspace is %s", got)
	}
	if got := w.state(stays.ID); got != core.WorkspaceReady {
		t.Errorf("the other workspace is %s", got)
	}
	send(false, false, same)
}

// TestEpochGivenTwice: the database has lost a registration, and the next process of the runner, which has lost its disk, is given the same
// epoch. A late heartbeat of the process before changes nothing.
func TestEpochGivenTwice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.register()
	ws := w.create("main")
	late := runnerapi.Heartbeat{LeaseEpoch: w.epoch, Number: 1, Info: w.runner.Info()} // from before there was the workspace
	w.sql(`UPDATE runners SET lease_epoch = lease_epoch - 1 WHERE lease_epoch = $1`, w.epoch)
	info := w.runner.Info()
	info.StartedAt = info.StartedAt.Add(time.Microsecond)
	out, err := w.Fleet().Register(t.Context(), runnerapi.Register{Info: info, Endpoint: w.runner.Endpoint()})
	if err != nil || out.LeaseEpoch != w.epoch {
		t.Fatalf("%+v, %v", out, err)
	}
	_, err = w.Fleet().Heartbeat(t.Context(), w.runner.ID(), late)
	wantCode(t, err, core.CodeRunnerLost)
	if got := w.state(ws.ID); got != core.WorkspaceReady {
		t.Errorf("the workspace is %s", got)
	}
	w.sql(`UPDATE runners SET lease_epoch = lease_epoch + 1`) // the same with an epoch that is known to be over
	_, err = w.Fleet().Heartbeat(t.Context(), w.runner.ID(), late)
	wantCode(t, err, core.CodeRunnerLost)
}

// TestEpochAhead: the database has lost a registration. The runner registers again, and nothing is given up.
func TestEpochAhead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	w.sql(`UPDATE runners SET lease_epoch = 1, started_at = started_at - interval '1 hour'`)
	_, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), runnerapi.Heartbeat{LeaseEpoch: w.epoch + 1, Info: w.runner.Info(), Sandboxes: w.runner.Sandboxes()})
	wantCode(t, err, core.CodeStateConflict)
	w.register()
	w.beat()
	if got := w.state(ws.ID); got != core.WorkspaceReady {
		t.Errorf("the workspace is %s", got)
	}
}
