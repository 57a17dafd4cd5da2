package postgres_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
)

// TestUsageIsOneRow reports the same sandbox many times, beside samples that an earlier version has written: what a workspace used is the
// largest of all at each moment, and one row a sandbox is left.
func TestUsageIsOneRow(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	const old = 250
	d.exec(fmt.Sprintf(`INSERT INTO usage_samples (project_id, workspace_id, sandbox_id, cpu_seconds, sent_bytes, received_bytes, created_at)
		SELECT '%s', '%s', CASE n %% 2 WHEN 0 THEN '%s' ELSE 'sbx_0' END, n, 2 * n, 1000 - n, now() - n * interval '1 hour' FROM generate_series(1, %d) n`, d.project, w.ID, w.Sandbox.ID, old))
	usage := func() (u controller.Usage) {
		t.Helper()
		d.mine(func(ctx context.Context, tx controller.AllTx) (err error) {
			u, err = tx.WorkspaceUsage(ctx, w.ID)
			return err
		})
		return u
	}
	want := func(what string, cpu float64, sent, received int64) {
		t.Helper()
		if u := usage(); u.CPUSeconds != cpu || u.SentBytes != sent || u.ReceivedBytes != received || u.SampledAt.IsZero() {
			t.Errorf("%s: %+v", what, u)
		}
	}
	report := func(cpu float64, sent, received int64) {
		t.Helper()
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			return tx.InsertUsage(ctx, d.runner, []runnerapi.Usage{{SandboxID: w.Sandbox.ID, CPUSeconds: cpu - 1}, {SandboxID: w.Sandbox.ID, CPUSeconds: cpu, SentBytes: sent, ReceivedBytes: received}})
		})
	}
	want("samples", 249+250, 498+500, 999+998)
	report(260, 10, 10)
	want("a report, too", 249+260, 498+500, 999+998)
	for calls := 0; ; calls++ {
		moved := 0
		d.system(func(ctx context.Context, tx controller.AllTx) (err error) {
			moved, err = tx.RollUsage(ctx, 100)
			return err
		})
		if moved > 100 {
			t.Errorf("%d samples were moved at once", moved)
		}
		want("while samples move", 249+260, 498+500, 999+998)
		if moved == 0 {
			if calls != 3 {
				t.Errorf("%d batches, want 3", calls)
			}
			break
		}
	}
	report(5, 600, 5) // an older one, which came late
	want("afterwards", 249+260, 498+600, 999+998)
	if n, m := d.number(`SELECT count(*) FROM usage_samples`), d.number(`SELECT count(*) FROM usage_totals`); n != 0 || m != 2 {
		t.Errorf("%d samples and %d totals are left", n, m)
	}
}
