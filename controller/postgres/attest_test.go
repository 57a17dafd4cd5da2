package postgres_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// attested is a report with an attestation of that many bytes.
func (d *db) attested(w controller.Workspace, epoch int64, size int) controller.ResealRecord {
	return controller.ResealRecord{
		ProjectID: w.ProjectID, WorkspaceID: w.ID, SandboxID: w.Sandbox.ID, OperationID: core.NewID[core.OperationID](), CheckpointID: core.NewID[core.CheckpointID](),
		Epoch: epoch, RunnerID: d.runner, Attestation: []byte(strings.Repeat("x", size)), Report: core.ResealReport{Generation: "g", Complete: true},
	}
}

// TestAttestationsAreAppendOnly: nobody changes one, none is larger than the bound, and the audit log has the digest.
func TestAttestationsAreAppendOnly(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	insert := func(r controller.ResealRecord) error {
		return d.store.InTx(t.Context(), controller.InProject(d.project), func(tx controller.AllTx) error {
			tx.InsertReseals([]controller.ResealRecord{r})
			return nil
		})
	}
	first := d.attested(w, 7, 65536)
	if err := insert(first); err != nil {
		t.Fatal(err)
	}
	if err := insert(d.attested(w, 8, 65537)); err == nil {
		t.Error("one beyond the bound is kept")
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		got, err := tx.Attestation(ctx, w.ID, 7)
		if err == nil && (string(got.Envelope) != string(first.Attestation) || got.Digest != core.DigestOf(first.Attestation)) {
			t.Errorf("%d bytes, %s", len(got.Envelope), got.Digest)
		}
		if _, absent := tx.Attestation(ctx, w.ID, 8); core.CodeOf(absent) != core.CodeAttestationNotFound {
			t.Errorf("an epoch without one: %v", absent)
		}
		list, auditErr := tx.AuditRecords(ctx, controller.AuditFilter{Object: string(w.ID), Limit: 100})
		found := 0
		for _, r := range list {
			if strings.Contains(string(r.Detail), string(got.Digest)) {
				found++
			}
		}
		if auditErr != nil || found != 1 {
			t.Errorf("%d audit records have the digest, %v", found, auditErr)
		}
		return err
	})
	d.sealAll()
	if check := d.check(); check.Broken != 0 || check.Records == 0 {
		t.Errorf("%+v", check)
	}
	conn := d.conn()
	for _, role := range []string{"", "SET LOCAL ROLE coppice_app; SET LOCAL coppice.project_id = 'system';"} {
		for _, change := range []string{`UPDATE attestations SET envelope = 'y'`, `DELETE FROM attestations`, `TRUNCATE attestations`} {
			_, err := conn.Exec(t.Context(), role+change)
			if err == nil || !strings.Contains(err.Error(), "append-only") && !strings.Contains(err.Error(), "permission denied") {
				t.Errorf("%s%s: %v", role, change, err)
			}
		}
	}
}

// TestAttestationsAreKeptForATime: months that are over for long enough go, whole.
func TestAttestationsAreKeptForATime(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	var now time.Time
	if err := d.conn().QueryRow(t.Context(), `SELECT now()`).Scan(&now); err != nil {
		t.Fatal(err)
	}
	now = now.UTC()
	month := func(back int) time.Time {
		return time.Date(now.Year(), now.Month()-time.Month(back), 1, 0, 0, 0, 0, time.UTC)
	}
	for back := range 4 {
		if back > 0 {
			d.exec(fmt.Sprintf(`CREATE TABLE attestations_%s PARTITION OF attestations FOR VALUES FROM ('%s') TO ('%s')`,
				month(back).Format("200601"), month(back).Format(time.RFC3339), month(back-1).Format(time.RFC3339)))
		}
		d.exec(`INSERT INTO attestations (project_id, workspace_id, epoch, sandbox_id, runner_id, digest, envelope, created_at)
			VALUES ($1, $2, $3, $4, $5, 'sha256:' || encode(sha256('x'), 'hex'), 'x', $6)`, d.project, w.ID, back+1, w.Sandbox.ID, d.runner, month(back))
	}
	left := func() (n int) {
		if err := d.conn().QueryRow(t.Context(), `SELECT count(*) FROM attestations WHERE digest = 'sha256:' || encode(sha256('x'), 'hex')`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	tidy := func(keep time.Duration) error {
		return d.store.InTx(t.Context(), controller.System(), func(tx controller.AllTx) error { return tx.TidyAttestations(t.Context(), keep) })
	}
	for _, c := range []struct {
		keep time.Duration
		want int
	}{{controller.AttestationsKept, 4}, {now.Sub(month(2)) + time.Hour, 4}, {now.Sub(month(2)), 3}, {24 * time.Hour, 1}} {
		if err := tidy(c.keep); err != nil {
			t.Fatal(err)
		}
		// On the first days of a month the last one is not over for a day yet.
		if got := left(); got != c.want && (c.keep != 24*time.Hour || got != 2) {
			t.Errorf("kept for %s: %d are left, want %d", c.keep, got, c.want)
		}
	}
	if err := tidy(time.Hour); err == nil {
		t.Error("they can be kept for an hour only")
	}
}
