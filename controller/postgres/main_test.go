package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
)

func TestMain(m *testing.M) { testleak.Main(m, testpg.Leak()) }

// db is a store with rows to work on.
type db struct {
	t       testing.TB
	dsn     string
	store   *postgres.Store
	project core.ProjectID
	runner  core.RunnerID
	class   runnerapi.RunnerClass
	image   core.Digest
	count   atomic.Int64
}

func newDB(t testing.TB) *db {
	t.Helper()
	d := &db{
		t: t, dsn: testpg.New(t, migrations.Up), runner: core.NewID[core.RunnerID](), image: core.DigestOf([]byte("image")),
		class: runnerapi.RunnerClass{Arch: "amd64", Accelerator: "tcg", CPUModel: "max", VMM: "fake", VMMVersion: "1", MachineType: "m"},
	}
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: d.dsn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	d.store = store
	d.project = d.newProject("default")
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.RegisterRunner(ctx, runnerapi.Register{Info: d.info(), Endpoint: "http://127.0.0.1:1"}, time.Minute)
		return err
	})
	return d
}

var started = time.Now() // of the runner's process

func (d *db) info() runnerapi.Info {
	return runnerapi.Info{
		RunnerID: d.runner, Version: runnerapi.Version, Hostname: "host", Class: d.class, Capacity: runnerapi.Capacity{Sandboxes: 100, VCPUs: 200, MemoryMiB: 1 << 20}, StartedAt: started,
	}
}

func (d *db) newProject(name string) core.ProjectID {
	d.t.Helper()
	var p controller.Project
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		var err error
		p, err = tx.EnsureProject(ctx, core.NewID[core.ProjectID](), name)
		return err
	})
	return p.ID
}

// in runs a transaction that must succeed.
func (d *db) in(scope controller.Scope, fn func(context.Context, controller.AllTx) error) {
	d.t.Helper()
	if err := d.try(scope, fn); err != nil {
		d.t.Fatal(err)
	}
}

func (d *db) try(scope controller.Scope, fn func(context.Context, controller.AllTx) error) error {
	ctx := context.WithoutCancel(d.t.Context())
	return d.store.InTx(ctx, scope, func(tx controller.AllTx) error { return fn(ctx, tx) })
}

func (d *db) system(fn func(context.Context, controller.AllTx) error) {
	d.t.Helper()
	d.in(controller.System(), fn)
}

func (d *db) mine(fn func(context.Context, controller.AllTx) error) {
	d.t.Helper()
	d.in(controller.InProject(d.project), fn)
}

// conn is a connection of the owner, past all policies.
func (d *db) conn() *pgx.Conn {
	d.t.Helper()
	conn, err := pgx.Connect(d.t.Context(), d.dsn)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() {
		if err := conn.Close(context.WithoutCancel(d.t.Context())); err != nil {
			d.t.Error(err)
		}
	})
	return conn
}

func (d *db) exec(sql string, args ...any) {
	d.t.Helper()
	conn, err := pgx.Connect(d.t.Context(), d.dsn)
	if err != nil {
		d.t.Fatal(err)
	}
	_, err = conn.Exec(d.t.Context(), sql, args...)
	if err := errors.Join(err, conn.Close(d.t.Context())); err != nil {
		d.t.Fatalf("%s: %v", sql, err)
	}
}

// counted says how many rows the database reads for what is done. A server process adds what it has counted at its end, so the store
// is opened again before and after.
func (d *db) counted(do func()) int64 {
	d.t.Helper()
	conn := d.conn()
	number := func(sql string) (n int64) {
		if err := conn.QueryRow(d.t.Context(), sql).Scan(&n); err != nil {
			d.t.Fatal(err)
		}
		return n
	}
	reopened := func() int64 {
		d.store.Close()
		eventually.True(d.t, "the store's connections have ended", func() bool {
			return number(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'coppice-controller'`) == 0
		})
		store, err := postgres.Open(d.t.Context(), postgres.Config{DSN: d.dsn})
		if err != nil {
			d.t.Fatal(err)
		}
		d.t.Cleanup(store.Close)
		d.store = store
		return number(`SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)::bigint FROM pg_stat_user_tables`)
	}
	before := reopened()
	do()
	return reopened() - before
}

var shape = core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}

func (d *db) captured() runnerapi.Checkpoint {
	return runnerapi.Checkpoint{
		Class: d.class, Base: core.NewID[core.BaseID](), DeltaBytes: 1, DeviceStateBytes: 2, DiskBytes: 3, PauseMS: 4,
		Timings: []core.Timing{{Stage: "pause", DurationMS: 4}}, ParentReseal: []core.ResealStep{{Name: "entropy", Status: core.ResealOK}},
		Processes: []core.StaleProcess{{PID: 1, Command: "x", Runtime: "go"}},
	}
}

// template inserts a captured template of its own image.
func (d *db) template() controller.Checkpoint {
	d.t.Helper()
	var cp controller.Checkpoint
	class := d.class
	cp = controller.Checkpoint{
		ID: core.NewID[core.CheckpointID](), ProjectID: controller.SystemProject, Kind: controller.KindTemplate, RunnerID: d.runner, Class: &class,
		Image: controller.ImageRef{Name: "base", Digest: core.DigestOf(fmt.Append(nil, d.count.Add(1)))}, Resources: shape,
	}
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		if err := tx.InsertCheckpoint(ctx, cp); err != nil {
			return err
		}
		var err error
		cp, err = tx.CaptureCheckpoint(ctx, cp.ID, d.runner, d.captured())
		return err
	})
	return cp
}

// identity is one that nobody has.
func (d *db) identity(hostname string) core.Identity {
	n := d.count.Add(1)
	return core.Identity{
		Generation: fmt.Sprintf("g-%d", n), Hostname: hostname, MachineID: fmt.Sprintf("%032x", n),
		MAC: fmt.Sprintf("02:00:00:%02x:%02x:%02x", n>>16&0xff, n>>8&0xff, n&0xff), IP: netip.AddrFrom4([4]byte{10, 83, byte(1 + n>>8), byte(n)}),
	}
}

func (d *db) plan(project core.ProjectID, from controller.Checkpoint) controller.Workspace {
	id := core.NewID[core.WorkspaceID]()
	w := controller.Workspace{
		ID: id, ProjectID: project, Name: fmt.Sprintf("w-%d", d.count.Add(1)), State: core.WorkspaceRestoring, Image: from.Image, Resources: shape,
		Egress: core.EgressDenyAll, Parent: from.ID, Env: map[string]string{"A": "1"}, Labels: map[string]string{"k": "v"},
	}
	w.Sandbox = controller.Sandbox{
		ID: core.NewID[core.SandboxID](), ProjectID: project, WorkspaceID: id, Epoch: 1, RunnerID: d.runner, Resources: shape, Identity: d.identity(w.Name),
	}
	return w
}

func insert(ctx context.Context, tx controller.AllTx, list ...controller.Workspace) error {
	if _, err := tx.InsertWorkspaces(ctx, list, 0); err != nil {
		return err
	}
	sandboxes := make([]controller.Sandbox, len(list))
	for i, w := range list {
		sandboxes[i] = w.Sandbox
	}
	tx.InsertSandboxes(sandboxes)
	_, err := tx.Occupied(ctx, sandboxes[0].RunnerID) // sends them
	return err
}

// ready inserts a workspace that runs.
func (d *db) ready(project core.ProjectID, from controller.Checkpoint) controller.Workspace {
	d.t.Helper()
	w := d.plan(project, from)
	d.in(controller.InProject(project), func(ctx context.Context, tx controller.AllTx) error {
		if err := insert(ctx, tx, w); err != nil {
			return err
		}
		list, err := tx.ReadyWorkspaces(ctx, []controller.ReadyWorkspace{{ID: w.ID, Epoch: 1, Sandbox: w.Sandbox.ID}})
		if err == nil && len(list) != 1 {
			err = fmt.Errorf("%d became ready", len(list))
		}
		if err == nil {
			w = list[0]
		}
		return err
	})
	return w
}

// node inserts a captured checkpoint of a workspace.
func (d *db) node(w controller.Workspace, parent core.CheckpointID) controller.Checkpoint {
	d.t.Helper()
	cp := controller.Checkpoint{
		ID: core.NewID[core.CheckpointID](), ProjectID: w.ProjectID, Kind: controller.KindUser, Parent: parent, WorkspaceID: w.ID, WorkspaceEpoch: w.Epoch,
		Image: w.Image, Resources: w.Resources, RunnerID: d.runner, Labels: map[string]string{"k": "v"},
	}
	d.in(controller.InProject(w.ProjectID), func(ctx context.Context, tx controller.AllTx) error {
		if err := tx.InsertCheckpoint(ctx, cp); err != nil {
			return err
		}
		var err error
		cp, err = tx.CaptureCheckpoint(ctx, cp.ID, d.runner, d.captured())
		return err
	})
	return cp
}

func (d *db) operation(kind controller.OperationKind, owner string, lease time.Duration) controller.Operation {
	d.t.Helper()
	op := controller.Operation{ID: core.NewID[core.OperationID](), ProjectID: d.project, Kind: kind, Input: []byte(`{}`), LeaseOwner: owner}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		var err error
		op, err = tx.InsertOperation(ctx, op, lease)
		return err
	})
	return op
}

func wantCode(t testing.TB, err error, code core.Code) {
	t.Helper()
	if core.CodeOf(err) != code {
		t.Errorf("got %v (%s), want %s", err, core.CodeOf(err), code)
	}
}

func page(n int) controller.Page { return controller.Page{Limit: n} }
