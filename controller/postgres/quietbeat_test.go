package postgres_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// TestQuietHeartbeats applies heartbeats of many runners at once. Each that is not quiet, or that would be refused alone, changes nothing, and the
// others are applied as if they had come alone.
func TestQuietHeartbeats(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	terms := controller.BeatTerms{Lease: time.Minute, RemovedWithin: time.Hour}
	cases := []struct {
		name    string
		applied bool
		change  func(*controller.QuietBeat)
		row     string // an update of the runner's row before
	}{
		{name: "quiet", applied: true},
		{name: "after skipped numbers", applied: true, change: func(b *controller.QuietBeat) { b.Number += 7 }},
		{name: "another load", applied: true, change: func(b *controller.QuietBeat) { b.Info.Allocated.Sandboxes, b.Info.DiskFreeMB = 3, 77 }},
		{name: "repeated", change: func(b *controller.QuietBeat) { b.Number-- }},
		{name: "its answer was lost", change: func(b *controller.QuietBeat) { b.Answered-- }},
		{name: "of a lost commit", change: func(b *controller.QuietBeat) { b.Answered++; b.Number++ }},
		{name: "of an earlier epoch", row: "lease_epoch = lease_epoch + 1"},
		{name: "of a later epoch", change: func(b *controller.QuietBeat) { b.LeaseEpoch++ }},
		{name: "of another process", change: func(b *controller.QuietBeat) { b.Info.StartedAt = b.Info.StartedAt.Add(time.Second) }},
		{name: "given up", row: "fenced_at = now()"},
		{name: "after one without a number", row: "beat_at = NULL"},
		{name: "after one of a controller that does not know numbers", row: "heartbeat_at = now() + interval '1 second'"},
		{name: "another capacity", change: func(b *controller.QuietBeat) { b.Info.Capacity.Sandboxes++ }},
		{name: "another KVM", change: func(b *controller.QuietBeat) { b.Info.KVM = "usable" }},
		{name: "another key", change: func(b *controller.QuietBeat) { b.Info.EgressKey = []byte("key") }},
		{name: "another address", change: func(b *controller.QuietBeat) { b.Info.EgressURL = "http://127.0.0.1:3" }},
		{name: "holds"},
		{name: "locked"},
	}
	from := d.template()
	cp := d.node(d.ready(d.project, from), from.ID)
	d.sealed(cp.ID)
	ids := map[string]core.RunnerID{}
	var list []controller.QuietBeat
	for _, c := range cases {
		id := d.another()
		ids[c.name] = id
		b := controller.QuietBeat{ID: id, Heartbeat: runnerapi.Heartbeat{LeaseEpoch: 1, Info: d.info()}}
		b.Info.RunnerID = id
		for range 2 { // the second follows the first
			b.Number, b.Answered = b.Number+1, b.Number
			d.system(func(ctx context.Context, tx controller.AllTx) error {
				_, err := tx.HeartbeatRunner(ctx, id, b.Heartbeat, terms)
				return err
			})
		}
		b.Number, b.Answered = b.Number+1, b.Number
		if c.change != nil {
			c.change(&b)
		}
		if c.row != "" {
			d.exec(`UPDATE runners SET `+c.row+` WHERE id = $1`, string(id))
		}
		list = append(list, b)
	}
	d.fetches(ids["holds"], cp.ID)
	list = append(list, controller.QuietBeat{ID: core.NewID[core.RunnerID](), Heartbeat: runnerapi.Heartbeat{LeaseEpoch: 1, Number: 3, Answered: 2, Info: d.info()}})
	removed := core.NewID[core.RunnerID]()
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		_, _, err := tx.RemoveRunner(ctx, removed)
		return err
	})
	row := func(id core.RunnerID) string {
		return d.column(`SELECT concat_ws(' ', beat, heartbeat_at, lease_expires_at, allocated, disk_free_mb) FROM runners WHERE id = $1`, string(id))[0]
	}
	audits := func() int64 { return d.number(`SELECT count(*) FROM audit_records`) }
	d.exec(`UPDATE runners SET draining = true`)
	before, audited := map[core.RunnerID]string{}, audits()
	for _, id := range ids {
		before[id] = row(id)
	}

	conn := d.conn()
	locking, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := locking.Exec(t.Context(), `SELECT FROM runners WHERE id = $1 FOR UPDATE`, string(ids["locked"])); err != nil {
		t.Fatal(err)
	}
	var got map[core.RunnerID]controller.Beaten
	d.system(func(ctx context.Context, tx controller.AllTx) (err error) {
		got, err = tx.HeartbeatQuietRunners(ctx, list, terms)
		return err
	})
	if err := locking.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}

	if n := audits(); n != audited {
		t.Errorf("%d records in the audit log; quiet heartbeats change nothing that is audited", n-audited)
	}
	want := 0
	for i, c := range cases {
		id := ids[c.name]
		out, applied := got[id]
		if applied != c.applied {
			t.Errorf("%s: applied: %v", c.name, applied)
			continue
		}
		if !applied {
			if now := row(id); now != before[id] {
				t.Errorf("%s: the row was %s and is %s", c.name, before[id], now)
			}
			continue
		}
		want++
		if !out.Next || out.Holds || !out.Draining || out.Endpoint != "http://127.0.0.1:2" || !slices.Equal(out.Removed, []core.RunnerID{removed}) {
			t.Errorf("%s: %+v", c.name, out)
		}
		b := list[i]
		if says := d.column(`SELECT concat_ws(' ', beat, beat_epoch, allocated->>'sandboxes', disk_free_mb, beat_at = heartbeat_at, lease_expires_at - heartbeat_at)
			FROM runners WHERE id = $1`, string(id))[0]; says != fmt.Sprintf("%d 1 %d %d t 00:01:00", b.Number, b.Info.Allocated.Sandboxes, b.Info.DiskFreeMB) {
			t.Errorf("%s: the row says %s", c.name, says)
		}
		// The next one comes alone, and finds what the quiet one has left.
		b.Number, b.Answered = b.Number+1, b.Number
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			alone, err := tx.HeartbeatRunner(ctx, id, b.Heartbeat, terms)
			if !alone.Settled.After(out.Settled) {
				t.Errorf("%s: the heartbeat before the next was at %v, and before the quiet one at %v", c.name, alone.Settled, out.Settled)
			}
			alone.Settled = out.Settled
			if diff := cmp.Diff(alone, out); diff != "" {
				t.Errorf("%s: alone (-) and together (+): %s", c.name, diff)
			}
			return err
		})
	}
	if len(got) != want {
		t.Errorf("applied: %v", got)
	}
}
