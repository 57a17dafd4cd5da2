package postgres_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
)

func (d *db) seal() int64 {
	d.t.Helper()
	var n int64
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		var err error
		n, err = tx.SealAudit(ctx)
		return err
	})
	return n
}

// sealAll seals until nothing is left: transactions of other databases on the server hold seals back too.
func (d *db) sealAll() {
	d.t.Helper()
	conn := d.conn()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range 3000 {
		d.seal()
		var left int
		if err := conn.QueryRow(d.t.Context(), `SELECT count(*) FROM audit_records WHERE xid >= coalesce((SELECT max(upper) FROM audit_seals), '0')`).Scan(&left); err != nil {
			d.t.Fatal(err)
		}
		if left == 0 {
			return
		}
		<-tick.C
	}
	d.t.Fatal("records are never sealed")
}

func (d *db) check() controller.AuditCheck {
	d.t.Helper()
	var got controller.AuditCheck
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		var err error
		got, err = tx.CheckAudit(ctx, d.project)
		return err
	})
	return got
}

func TestAuditIsAppendOnly(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	d.ready(d.project, d.template())
	d.sealAll() // a change of no rows would be no error
	conn := d.conn()
	for _, role := range []string{"", "SET LOCAL ROLE coppice_app; SET LOCAL coppice.project_id = 'system';"} {
		for _, change := range []string{
			`UPDATE audit_records SET actor = 'somebody else'`, `DELETE FROM audit_records`, `TRUNCATE audit_records`,
			`UPDATE audit_seals SET hash = ''`, `DELETE FROM audit_seals`, `TRUNCATE audit_seals`,
		} {
			_, err := conn.Exec(t.Context(), role+change)
			if err == nil || !strings.Contains(err.Error(), "append-only") && !strings.Contains(err.Error(), "permission denied") {
				t.Errorf("%s%s: %v", role, change, err)
			}
		}
	}
}

// TestAuditRollsBack has no record of what did not happen.
func TestAuditRollsBack(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	template := d.template()
	var before, after int
	count := `SELECT count(*) FROM audit_records`
	if err := d.conn().QueryRow(t.Context(), count).Scan(&before); err != nil {
		t.Fatal(err)
	}
	no := context.Canceled
	if err := d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
		if err := tx.InsertAudit(ctx, controller.AuditRecord{ProjectID: d.project, Object: "x", Outcome: controller.AuditAccepted}); err != nil {
			return err
		}
		return no
	}); err == nil {
		t.Fatal("committed")
	}
	if err := d.conn().QueryRow(t.Context(), count).Scan(&after); err != nil || before != after {
		t.Errorf("%d, then %d, %v", before, after, err)
	}
	d.ready(d.project, template)
	if err := d.conn().QueryRow(t.Context(), count).Scan(&after); err != nil || after == before {
		t.Errorf("%d, then %d, %v", before, after, err)
	}
}

// TestSealsShowTampering changes sealed records as the owner can, who may switch triggers off.
func TestSealsShowTampering(t *testing.T) {
	t.Parallel()
	for name, tamper := range map[string]string{
		"changed":        `UPDATE audit_records SET actor = 'somebody else' WHERE id = (SELECT min(id) FROM audit_records WHERE project_id = '%')`,
		"removed":        `DELETE FROM audit_records WHERE id = (SELECT min(id) FROM audit_records WHERE project_id = '%')`,
		"inserted":       `INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, xid) SELECT project_id, '', 'x', '', 'x', 'x', '', '', 'succeeded', '', xid FROM audit_records WHERE project_id = '%' ORDER BY id LIMIT 1`,
		"a seal removed": `DELETE FROM audit_seals WHERE project_id = '%' AND seq = 1`,
		"a seal changed": `UPDATE audit_seals SET records = records + 1 WHERE project_id = '%' AND seq = 1`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDB(t)
			template := d.template()
			d.ready(d.project, template)
			d.sealAll()
			d.ready(d.project, template)
			if got := d.check(); got.Seals == 0 || got.Unsealed == 0 || got.Broken != 0 {
				t.Errorf("%+v", got)
			}
			d.sealAll()
			if got := d.check(); got.Seals < 2 || got.Unsealed != 0 || got.Broken != 0 || len(got.Head) != 64 {
				t.Errorf("%+v", got)
			}
			d.exec(`ALTER TABLE audit_records DISABLE TRIGGER ALL`)
			d.exec(`ALTER TABLE audit_seals DISABLE TRIGGER ALL`)
			for _, part := range d.partitions("audit_records") {
				d.exec(`ALTER TABLE ` + part + ` DISABLE TRIGGER ALL`)
			}
			d.exec(strings.ReplaceAll(tamper, "%", string(d.project)))
			if got := d.check(); got.Broken == 0 {
				t.Errorf("it is not seen: %+v", got)
			}
		})
	}
}

func (d *db) partitions(table string) []string {
	d.t.Helper()
	rows, err := d.conn().Query(d.t.Context(), `SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = $1::text::regclass`, table)
	if err != nil {
		d.t.Fatal(err)
	}
	defer rows.Close()
	var list []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			d.t.Fatal(err)
		}
		list = append(list, s)
	}
	return list
}

// TestSealsMissNothing seals while transactions are open: each row is sealed once, whenever it was committed.
func TestSealsMissNothing(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	record := func(ctx context.Context, tx controller.AllTx) error {
		return tx.InsertAudit(ctx, controller.AuditRecord{ProjectID: d.project, Object: "x", Outcome: controller.AuditAccepted})
	}
	d.sealAll()
	start := d.check().Records
	if err := d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
		if err := record(ctx, tx); err != nil { // an old transaction ...
			return err
		}
		d.mine(record) // ... while a younger one is committed
		if n := d.seal(); n != 0 {
			t.Errorf("%d sealed although an older transaction is open", n)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	d.mine(record)
	d.sealAll()
	if got := d.check(); got.Records-start != 3 || got.Unsealed != 0 || got.Broken != 0 {
		t.Errorf("%+v", got)
	}
}

// TestSealsReadNewRecordsOnly: what it costs to seal grows with the new records and with their projects, and not with the product of both.
func TestSealsReadNewRecordsOnly(t *testing.T) {
	t.Parallel()
	const projects, old, fresh = 200, 40, 50
	d := newDB(t)
	insert := func(each int) {
		d.exec(`
			INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id)
			SELECT 'prj_' || p, '', 'x', '', 'x', 'x', '', '', 'succeeded', '' FROM generate_series(1, $1::int) AS p, generate_series(1, $2::int)`, projects, each)
	}
	conn := d.conn()
	number := func(sql string) (n int) {
		t.Helper()
		if err := conn.QueryRow(t.Context(), sql).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	const records = `SELECT coalesce(sum(records), 0)::bigint FROM audit_seals`
	insert(old)
	d.sealAll()
	d.exec(`VACUUM ANALYZE audit_records, audit_seals`)
	insert(fresh)
	pages, before := 0, number(records)
	for tick := time.NewTicker(10 * time.Millisecond); number(records) < before+projects*fresh; <-tick.C { // transactions of other databases hold seals back
		var plan []struct {
			Plan struct {
				Hit  int `json:"Shared Hit Blocks"`
				Read int `json:"Shared Read Blocks"`
			}
		}
		was := number(records)
		var text []byte
		if err := conn.QueryRow(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT coppice_seal_audit()`).Scan(&text); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, &plan); err != nil {
			t.Fatal(err)
		}
		if number(records) > was {
			pages += plan[0].Plan.Hit + plan[0].Plan.Read
		}
	}
	t.Logf("to seal %d records of %d projects read %d pages", projects*fresh, projects, pages)
	if most := 20 * projects; pages > most {
		t.Errorf("to seal %d records of %d projects read %d pages, want at most %d", projects*fresh, projects, pages, most)
	}
	if broken := number(`
		SELECT count(*) FROM audit_seals s CROSS JOIN LATERAL coppice_audit_hash(s.project_id, s.lower, s.upper, s.previous) h
		WHERE h.hash <> s.hash OR h.records <> s.records`); broken > 0 {
		t.Errorf("%d seals do not have the hash of their records", broken)
	}
}
