package postgres_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/core"
)

// populate gives a project a row in every table that tenants have.
func (d *db) populate(project core.ProjectID, from controller.Checkpoint) (controller.Workspace, controller.Checkpoint, controller.Operation) {
	d.t.Helper()
	w := d.ready(project, from)
	cp := d.node(w, from.ID)
	op := controller.Operation{ID: core.NewID[core.OperationID](), ProjectID: project, Kind: controller.OpForkCheckpoint, Input: []byte(`{}`), LeaseOwner: "o", WorkspaceID: w.ID}
	session := controller.Session{ID: core.NewID[core.SessionID](), ProjectID: project, WorkspaceID: w.ID, SandboxID: w.Sandbox.ID}
	session.GuestID = session.ID
	d.exec(`INSERT INTO retention_policies (project_id, checkpoint_id, policy) VALUES ('` + string(project) + `', '` + string(cp.ID) + `', '{}')`)
	d.exec(`INSERT INTO retention_rounds (project_id, checkpoint_id, policy_version) VALUES ('` + string(project) + `', '` + string(cp.ID) + `', 1)`)
	d.exec(`INSERT INTO usage_samples (project_id, workspace_id, sandbox_id, cpu_seconds, sent_bytes, received_bytes)
		VALUES ('` + string(project) + `', '` + string(w.ID) + `', '` + string(w.Sandbox.ID) + `', 1, 1, 1)`)
	d.exec(`INSERT INTO usage_totals (project_id, workspace_id, sandbox_id, cpu_seconds, sent_bytes, received_bytes)
		VALUES ('` + string(project) + `', '` + string(w.ID) + `', '` + string(w.Sandbox.ID) + `', 1, 1, 1)`)
	d.in(controller.InProject(project), func(ctx context.Context, tx controller.AllTx) error {
		var err error
		if op, err = tx.InsertOperation(ctx, op, time.Minute); err != nil {
			return err
		}
		if err := tx.InsertSession(ctx, session, manySessions); err != nil {
			return err
		}
		hash := sha256.Sum256([]byte(project))
		if _, err := tx.InsertAttachToken(ctx, controller.AttachToken{Hash: hash, ProjectID: project, SessionID: session.ID, SandboxID: w.Sandbox.ID}, time.Minute); err != nil {
			return err
		}
		if err := tx.EnsureKey(ctx, controller.Key{ID: core.NewID[core.KeyID](), ProjectID: project, Name: "k", Prefix: "p", Hash: hash}); err != nil {
			return err
		}
		if _, err := tx.ClaimKey(ctx, project, "k", controller.KeyUse{Object: string(op.ID)}, time.Minute); err != nil {
			return err
		}
		if _, err := tx.InsertPort(ctx, controller.Port{ID: core.NewID[core.PortID](), ProjectID: project, WorkspaceID: w.ID, GuestPort: 80, Listen: "127.0.0.1:0"}); err != nil {
			return err
		}
		if err := tx.UseWorkspaces(ctx, []core.WorkspaceID{w.ID}); err != nil {
			return err
		}
		tx.InsertReseals([]controller.ResealRecord{{
			ProjectID: project, WorkspaceID: w.ID, SandboxID: w.Sandbox.ID, OperationID: op.ID, CheckpointID: cp.ID,
			Report: core.ResealReport{Generation: w.Sandbox.Identity.Generation, Complete: true},
		}})
		return nil
	})
	d.exec(`INSERT INTO flows (project_id, workspace_id, sandbox_id, epoch, id, at, final, changes, spoken, host, port, method, path, outcome, rule, grant_id, reason, status, sent_bytes, received_bytes)
		VALUES ($1, $2, $3, 1, 'f', now(), true, true, 'http', 'h', 80, 'POST', '/', 'allowed', 'h', '', '', 200, 1, 1)`, project, w.ID, w.Sandbox.ID)
	d.exec(`INSERT INTO flow_rows (project_id, workspace_id, month, rows) VALUES ($1, $2, '2026-11-01', 1)`, project, w.ID)
	d.exec(`INSERT INTO flow_counts (project_id, workspace_id, sandbox_id, epoch, kind, daily, from_at, spoken, opaque, host, port, grant_id, rule, count, sent_bytes, received_bytes, first_at, last_at)
		VALUES ($1, $2, $3, 1, 'effect', false, now(), 'http', false, 'h', 80, '', 'h', 1, 1, 1, now(), now())`, project, w.ID, w.Sandbox.ID)
	d.exec(`INSERT INTO prepared_checkpoints (checkpoint_id, project_id, count, expires_at) VALUES ($1, $2, 1, now())`, cp.ID, project)
	d.exec(`INSERT INTO uploads (data_id, project_id, id, expires_at) VALUES ($1, $1, 'u', now())`, project)
	d.exec(`INSERT INTO upload_parts (data_id, project_id, index, data) VALUES ($1, $1, 0, 'x')`, project)
	d.exec(`INSERT INTO project_images (project_id, name, checkpoint_id, source, config, operation_id, steps, cached_steps)
		VALUES ($1, 'i', $2, 'base', '{}', $3, 0, 0)`, project, cp.ID, op.ID)
	d.exec(`INSERT INTO build_logs (operation_id, project_id, at, data) VALUES ($1, $2, 0, 'x')`, op.ID, project)
	d.exec(`INSERT INTO step_actions (operation_id, project_id, index, request) VALUES ($1, $2, 0, '{}')`, op.ID, project)
	d.exec(`INSERT INTO session_counts (project_id, rows) VALUES ($1, 1)`, project)
	d.exec(`INSERT INTO attestations (project_id, workspace_id, epoch, sandbox_id, runner_id, digest, envelope)
		VALUES ($1, $2, 1, $3, $4, 'sha256:' || encode(sha256('x'), 'hex'), 'x')`, project, w.ID, w.Sandbox.ID, d.runner)
	d.exec(`INSERT INTO imports (checkpoint_id, project_id, lease_expires_at) VALUES ($1, $2, now())`, core.NewID[core.CheckpointID](), project)
	d.exec(`INSERT INTO seals (checkpoint_id, project_id, runner_id, lease_epoch, attempt, state) VALUES ($1, $2, $3, 1, 1, 'uploading')`, cp.ID, project, d.runner)
	d.exec(`INSERT INTO store_objects (key, project_id, checkpoint_id, attempt, bytes) VALUES ($1, $2, $3, 1, 1)`, "v1/"+string(cp.ID), project, cp.ID)
	d.exec(`INSERT INTO checkpoint_objects (checkpoint_id, key, project_id) VALUES ($1, $2, $3)`, cp.ID, "v1/"+string(cp.ID), project)
	d.exec(`INSERT INTO store_released (project_id, key) VALUES ($1, 'x')`, project)
	d.exec(`INSERT INTO project_keys (project_id, version, master_id, sealed_key) VALUES ($1, 1, 'x', 'x')`, project)
	d.exec(`INSERT INTO secrets (id, project_id, master_id, sealed_key, sealed) VALUES ('sec_' || $1, $1, 'x', 'x', 'x')`, project)
	d.exec(`INSERT INTO project_authorities (project_id, certificate, secret_id) VALUES ($1, 'x', 'sec_' || $1)`, project)
	d.exec(`INSERT INTO grants (id, project_id, workspace_id, name, provider, mode, vault_ref, secret_id, hosts, header, methods, paths, env, base_env, base_path, max_bytes, per_minute)
		VALUES ('grant_' || $1, $1, $2, 'g', 'custom', 'header', '', 'sec_' || $1, '{a.example:443}', 'Authorization', '{}', '{}', 'G', '', '', 0, 0)`, project, w.ID)
	d.exec(`INSERT INTO grant_holders (workspace_id, name, project_id, grant_id, placeholder) VALUES ($1, 'g', $2, 'grant_' || $2, 'p' || $2)`, w.ID, project)
	d.exec(`INSERT INTO store_debris (prefix, project_id) VALUES ($1, $2)`, "v1/"+string(cp.ID)+"/", project)
	d.exec(`INSERT INTO checkpoint_copies (checkpoint_id, runner_id, project_id) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING`, cp.ID, d.runner, project)
	d.exec(`INSERT INTO store_holds (checkpoint_id, runner_id, project_id) VALUES ($1, $2, $3)`, cp.ID, d.runner, project)
	d.sealAll()
	return w, cp, op
}

// tables lists every table of the schema that is not a partition.
func tables(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `
		SELECT c.relname FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relname <> 'schema_migrations' ORDER BY 1`)
	if err != nil {
		t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(list) < 13 {
		t.Fatal(list, err)
	}
	return list
}

func TestEveryTableIsForced(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	conn := d.conn()
	for _, table := range tables(t, conn) {
		var enabled, forced, column bool
		if err := conn.QueryRow(t.Context(), `
			SELECT relrowsecurity, relforcerowsecurity, EXISTS (SELECT 1 FROM information_schema.columns WHERE table_name = $1 AND column_name = 'project_id')
			FROM pg_class WHERE oid = $1::text::regclass`, table).Scan(&enabled, &forced, &column); err != nil {
			t.Fatal(err)
		}
		if !enabled || !forced || !column {
			t.Errorf("%s: row-level security %v, forced %v, project_id %v", table, enabled, forced, column)
		}
	}
	var super, bypass, owner bool
	if err := conn.QueryRow(t.Context(), `
		SELECT rolsuper, rolbypassrls, EXISTS (SELECT 1 FROM pg_class WHERE relowner = r.oid) FROM pg_roles r WHERE rolname = 'coppice_app'`).Scan(&super, &bypass, &owner); err != nil {
		t.Fatal(err)
	}
	if super || bypass || owner {
		t.Errorf("coppice_app: superuser %v, bypasses %v, owns tables %v", super, bypass, owner)
	}
}

// TestMissingWhereCannotLeak asks each table for everything, as the role and in the scope that the store works in.
func TestMissingWhereCannotLeak(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	template := d.template()
	other := d.newProject("other")
	d.populate(d.project, template)
	d.populate(other, template)
	conn := d.conn()
	systems := []string{"clusters", "runner_tokens", "runner_identities", "runner_loads", "flow_batches"} // no project ever sees a row of these
	shared := map[string]string{"checkpoints": " AND NOT shared", "images": " AND NOT shared", "image_locations": " AND NOT shared", "checkpoint_copies": " AND NOT shared", "runners": " AND false"}
	for _, table := range tables(t, conn) {
		// A scope that is not set sees nothing at all.
		for _, scope := range []string{"", string(d.project)} {
			tx, err := conn.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(t.Context(), fmt.Sprintf("SET LOCAL ROLE coppice_app; SET LOCAL coppice.project_id = '%s'", scope)); err != nil {
				t.Fatal(err)
			}
			var all, foreign int
			if err := tx.QueryRow(t.Context(), fmt.Sprintf(`SELECT count(*), count(*) FILTER (WHERE project_id <> '%s'%s) FROM %s`, scope, shared[table], table)).Scan(&all, &foreign); err != nil {
				t.Fatalf("%s: %v", table, err)
			}
			if foreign != 0 || scope == "" && all != 0 || scope != "" && all == 0 && table != "images" && table != "image_locations" && !slices.Contains(systems, table) {
				t.Errorf("%s in scope %q: %d rows, %d of others", table, scope, all, foreign)
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	// A write without a WHERE stays in its project too, and nothing can be put into another one.
	for _, c := range []struct{ sql, want string }{
		{`UPDATE workspaces SET labels = '{"touched": "1"}'`, ""},
		{`UPDATE checkpoints SET labels = '{"touched": "1"}'`, ""},
		{`DELETE FROM ports`, ""},
		{`UPDATE workspaces SET project_id = '` + string(other) + `'`, "row-level security"},
		{`INSERT INTO operations (id, project_id, kind, state, input) VALUES ('op_x', '` + string(other) + `', 'x', 'pending', '{}')`, "row-level security"},
		{`UPDATE runners SET draining = true`, ""},
		{`DELETE FROM workspaces`, "permission denied"},
		{`DELETE FROM reseal_reports`, "permission denied"},
		{`UPDATE reseal_reports SET complete = false`, "permission denied"},
		{`DELETE FROM attestations`, "permission denied"},
		{`UPDATE attestations SET epoch = 2`, "permission denied"},
		{`ALTER TABLE workspaces DISABLE ROW LEVEL SECURITY`, "must be owner"},
	} {
		tx, err := conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(t.Context(), fmt.Sprintf("SET LOCAL ROLE coppice_app; SET LOCAL coppice.project_id = '%s'", d.project)); err != nil {
			t.Fatal(err)
		}
		_, err = tx.Exec(t.Context(), c.sql)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v", c.sql, err)
		}
		if err == nil {
			err = tx.Commit(t.Context())
		} else {
			err = tx.Rollback(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	var touched, ports, draining int
	if err := conn.QueryRow(t.Context(), `
		SELECT (SELECT count(*) FROM workspaces WHERE project_id = $1 AND labels ? 'touched') + (SELECT count(*) FROM checkpoints WHERE project_id <> $2 AND labels ? 'touched'),
			(SELECT count(*) FROM ports WHERE project_id = $1), (SELECT count(*) FROM runners WHERE draining)`, other, d.project).Scan(&touched, &ports, &draining); err != nil {
		t.Fatal(err)
	}
	if touched != 0 || ports != 1 || draining != 0 {
		t.Errorf("other project: %d rows touched, %d ports; %d runners draining", touched, ports, draining)
	}
}

// TestForeignIsAbsent reads and writes one project's objects from another, through the store.
func TestForeignIsAbsent(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	template := d.template()
	other := d.newProject("other")
	w, cp, op := d.populate(d.project, template)
	none := core.NewID[core.WorkspaceID]()
	scope := controller.InProject(other)
	for name, fn := range map[string]func(context.Context, controller.AllTx) error{
		"workspace": func(ctx context.Context, tx controller.AllTx) error { _, err := tx.Workspace(ctx, w.ID); return err },
		"move": func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.MoveWorkspace(ctx, w.ID, 1, core.WorkspaceTerminating)
			return err
		},
		"patch": func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.PatchWorkspace(ctx, w.ID, controller.WorkspacePatch{})
			return err
		},
		"checkpoint": func(ctx context.Context, tx controller.AllTx) error { _, err := tx.Checkpoint(ctx, cp.ID); return err },
		"tree": func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.Tree(ctx, cp.ID, controller.TreePage{Page: page(10), MaxDepth: -1})
			return err
		},
		"delete": func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.DeleteCheckpoint(ctx, cp.ID, false)
			return err
		},
		"annotate": func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.PatchCheckpoint(ctx, cp.ID, controller.CheckpointPatch{})
			return err
		},
		"operation": func(ctx context.Context, tx controller.AllTx) error { _, err := tx.Operation(ctx, op.ID); return err },
	} {
		if err := d.try(scope, fn); core.CategoryOf(err) != core.NotFound {
			t.Errorf("%s: %v", name, err)
		}
	}
	foreign := d.try(scope, func(ctx context.Context, tx controller.AllTx) error { _, err := tx.Workspace(ctx, w.ID); return err })
	absent := d.try(scope, func(ctx context.Context, tx controller.AllTx) error { _, err := tx.Workspace(ctx, none); return err })
	if strings.ReplaceAll(core.MessageOf(foreign), string(w.ID), "") != strings.ReplaceAll(core.MessageOf(absent), string(none), "") {
		t.Errorf("foreign and absent differ: %v, %v", foreign, absent)
	}
	d.in(scope, func(ctx context.Context, tx controller.AllTx) error {
		lineage, err := tx.Lineage(ctx, cp.ID, "", 10)
		if err != nil || len(lineage) != 0 {
			t.Errorf("lineage: %v, %v", lineage, err)
		}
		// The template is everybody's, what others forked from it is not.
		nodes, err := tx.Tree(ctx, template.ID, controller.TreePage{Page: page(10), MaxDepth: -1})
		if err != nil || len(nodes) != 1 || nodes[0].Checkpoint.ChildrenCount != 0 {
			t.Errorf("tree of the template: %+v, %v", nodes, err)
		}
		return err
	})
	// A child cannot be hung below another project's node.
	bad := controller.Checkpoint{
		ID: core.NewID[core.CheckpointID](), ProjectID: other, Kind: controller.KindUser, Parent: cp.ID, WorkspaceID: w.ID, WorkspaceEpoch: 1, Image: w.Image, Resources: shape,
	}
	if err := d.try(scope, func(ctx context.Context, tx controller.AllTx) error { return tx.InsertCheckpoint(ctx, bad) }); err == nil {
		t.Error("a checkpoint below a foreign parent was inserted")
	}
	template2 := template.ID
	wantCode(t, d.try(scope, func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.PatchCheckpoint(ctx, template2, controller.CheckpointPatch{Labels: map[string]*string{"x": nil}})
		return err
	}), core.CodePermissionDenied)
}

func TestKeys(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	hash := sha256.Sum256([]byte("secret"))
	key := controller.Key{ID: core.NewID[core.KeyID](), ProjectID: d.project, Name: "k", Prefix: "se", Hash: hash, Scopes: []core.KeyScope{core.ScopeAdmin}}
	for range 2 { // idempotent
		d.system(func(ctx context.Context, tx controller.AllTx) error { return tx.EnsureKey(ctx, key) })
	}
	find := func() (controller.Key, error) {
		var got controller.Key
		err := d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error {
			var err error
			got, err = tx.KeyByHash(ctx, hash)
			return err
		})
		return got, err
	}
	got, err := find()
	if err != nil || got.ProjectID != d.project || got.Scopes[0] != "admin" || got.Prefix != "se" {
		t.Errorf("%+v, %v", got, err)
	}
	d.exec(`UPDATE api_keys SET expires_at = now() - interval '1 s'`)
	_, err = find()
	wantCode(t, err, core.CodeUnauthenticated)
	d.exec(`UPDATE api_keys SET expires_at = NULL, revoked_at = now()`)
	_, err = find()
	wantCode(t, err, core.CodeUnauthenticated)
	if d.newProject("default") != d.project {
		t.Error("the project was made twice")
	}
}

// TestPooledConnectionKeepsNoScope sends transactions of every scope and every ending over one connection: the next one sees
// its own project and nothing of what the one before could.
func TestPooledConnectionKeepsNoScope(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	template := d.template()
	other := d.newProject("other")
	mine, theirs := d.ready(d.project, template), d.ready(other, template)
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: d.dsn, MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	seen := func(scope controller.Scope) (ids []core.WorkspaceID) {
		t.Helper()
		if err := store.InTx(t.Context(), scope, func(tx controller.AllTx) error {
			list, err := tx.Workspaces(t.Context(), controller.WorkspaceFilter{Page: page(10)})
			for _, w := range list {
				ids = append(ids, w.ID)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return ids
	}
	nothing := errors.New("nothing")
	endings := map[string]func(controller.Scope){
		"commit": func(s controller.Scope) { seen(s) },
		"rollback": func(s controller.Scope) {
			if err := store.InTx(t.Context(), s, func(controller.AllTx) error { return nothing }); !errors.Is(err, nothing) {
				t.Error(err)
			}
		},
		"failed statement": func(s controller.Scope) {
			if err := store.InTx(t.Context(), s, func(tx controller.AllTx) error {
				_, err := tx.InsertProject(t.Context(), "prj_x", "Not A Name")
				return err
			}); err == nil {
				t.Error("it was taken")
			}
		},
		"panic": func(s controller.Scope) {
			defer func() { _ = recover() }()
			_ = store.InTx(t.Context(), s, func(controller.AllTx) error { panic("x") })
		},
		"a look at the whole cluster": func(s controller.Scope) {
			if err := store.InTx(t.Context(), s, func(tx controller.AllTx) error {
				_, err := tx.FreeAddresses(t.Context(), controller.AddressesWanted{Tree: "x", Runners: []core.RunnerID{d.runner}})
				if err != nil {
					return err
				}
				list, err := tx.Workspaces(t.Context(), controller.WorkspaceFilter{Page: page(10)})
				if s != controller.System() && len(list) != 1 {
					t.Errorf("after a look at the whole cluster there are %d workspaces", len(list))
				}
				return err
			}); err != nil {
				t.Error(err)
			}
		},
		"a look at the whole cluster that fails": func(s controller.Scope) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			_ = store.InTx(t.Context(), s, func(tx controller.AllTx) error {
				_, err := tx.FreeAddresses(ctx, controller.AddressesWanted{Tree: "x", Runners: []core.RunnerID{d.runner}})
				return err
			})
		},
	}
	for name, end := range endings {
		for _, before := range []controller.Scope{controller.System(), controller.InProject(d.project), controller.InProject(other)} {
			end(before)
			if got := seen(controller.InProject(d.project)); len(got) != 1 || got[0] != mine.ID {
				t.Errorf("after a %s in scope %s one project sees %v", name, before, got)
			}
			end(before)
			if got := seen(controller.InProject(other)); len(got) != 1 || got[0] != theirs.ID {
				t.Errorf("after a %s in scope %s the other sees %v", name, before, got)
			}
		}
	}
}

// TestRevokedMeanwhile revokes a key while a child is being made of it: the child is revoked too, or not made.
func TestRevokedMeanwhile(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	for i := range 8 {
		parent, child := d.key(i, ""), d.key(100+i, "")
		child.Parent = parent.ID
		d.system(func(ctx context.Context, tx controller.AllTx) error { return tx.EnsureKey(ctx, parent) })
		var group sync.WaitGroup
		var made error
		group.Go(func() {
			made = d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
				_, err := tx.InsertKey(ctx, child, time.Hour)
				return err
			})
		})
		group.Go(func() {
			d.system(func(ctx context.Context, tx controller.AllTx) error { return tx.RevokeKey(ctx, parent.ID) })
		})
		group.Wait()
		if made != nil {
			wantCode(t, made, core.CodeUnauthenticated)
			continue
		}
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			got, err := tx.Key(ctx, child.ID)
			if got.RevokedAt.IsZero() {
				t.Errorf("a child of a revoked key is valid: %+v", got)
			}
			return err
		})
	}
}

func (d *db) key(n int, parent core.KeyID) controller.Key {
	return controller.Key{
		ID: core.NewID[core.KeyID](), ProjectID: d.project, Name: "k", Prefix: "p", Hash: sha256.Sum256(fmt.Append(nil, n)), Parent: parent,
		Scopes: []core.KeyScope{core.ScopeWorkspaceRead},
	}
}

// TestKeyUse records the newest use, and finds what has ended.
func TestKeyUse(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	valid, expired := d.key(1, ""), d.key(2, "")
	early, late := time.Now().Add(-time.Hour).Truncate(time.Second), time.Now().Truncate(time.Second)
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		for _, k := range []controller.Key{valid, expired} {
			if err := tx.EnsureKey(ctx, k); err != nil {
				return err
			}
		}
		for _, at := range []time.Time{late, early} {
			if err := tx.UseKeys(ctx, map[core.KeyID]time.Time{valid.ID: at, expired.ID: at}); err != nil {
				return err
			}
		}
		got, err := tx.Key(ctx, valid.ID)
		if !got.LastUsedAt.Equal(late) {
			t.Errorf("last used %v, want %v", got.LastUsedAt, late)
		}
		return err
	})
	d.exec(`UPDATE api_keys SET expires_at = now() WHERE id = $1`, expired.ID)
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		ended, err := tx.EndedKeys(ctx, []core.KeyID{valid.ID, expired.ID})
		if len(ended) != 1 || ended[0] != expired.ID {
			t.Errorf("ended: %v", ended)
		}
		return err
	})
}
