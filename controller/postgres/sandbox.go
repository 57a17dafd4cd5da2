package postgres

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

const sandboxColumns = `
	s.id, s.project_id, s.workspace_id, s.epoch, s.runner_id, r.endpoint, r.egress_key, r.egress_url, s.vcpus, s.memory_mib, s.generation, s.hostname, s.machine_id, s.mac, s.ip, s.tree_id`

type addressRow struct {
	RunnerID core.RunnerID `db:"runner_id"`
	IP       string        `db:"ip"`
}

// FreeAddresses draws from 10.83.0.0/16 without its first 256 addresses and the broadcast address. An address is free if no living
// sandbox of the same runner (in any project) and no living sandbox of the same tree has it. FreeAddresses looks at random candidates.
// Each costs at most two probes of an index. If too few of them are free, it looks at more candidates, but never at the whole pool: if
// less than one address in a hundred is free, the pool counts as used up. Two transactions may draw the same address; the unique indexes
// decide.
func (t *tx) FreeAddresses(ctx context.Context, w controller.AddressesWanted) ([]string, error) {
	d := draw{wanted: w, out: make([]string, len(w.Runners)), seen: map[string]bool{"10.83.255.255": true}}
	for _, ip := range w.Except {
		d.seen[ip] = true
	}
	for i := range w.Runners {
		d.open = append(d.open, i)
	}
	for _, look := range []struct{ each, more int }{{2, 2}, {16, 64}, {128, 1024}} {
		// Each candidate that is free in the tree is assigned to a runner, and runners take turns. OFFSET 0 makes the planner probe the
		// index for each candidate: see workspaceJoins.
		rows, err := pgtx.ByIndex[addressRow](ctx, t, `
			WITH free AS MATERIALIZED (
				SELECT c.ip, (@runners::text[])[1 + (row_number() OVER () - 1) % cardinality(@runners::text[])] AS runner_id FROM unnest(@candidates::text[]) AS c (ip)
				WHERE NOT EXISTS (SELECT 1 FROM sandboxes s WHERE s.tree_id = @tree AND s.ip = c.ip AND s.ended_at IS NULL OFFSET 0)
			)
			SELECT f.runner_id, f.ip FROM free f
			WHERE NOT EXISTS (SELECT 1 FROM sandboxes s WHERE s.runner_id = f.runner_id AND s.ip = f.ip AND s.ended_at IS NULL OFFSET 0)`,
			pgtx.Args{"runners": d.runners(), "candidates": d.candidates(len(d.open)*look.each + look.more), "tree": w.Tree})
		if err != nil {
			return nil, err
		}
		if d.take(rows); len(d.open) == 0 {
			return d.out, nil
		}
	}
	return nil, core.Errorf(core.Exhausted, core.CodeCapacity,
		"hardly any address of 10.83.0.0/16 is free both on runner %s and in this tree, and %d are needed; terminate workspaces of the tree, or create a workspace from an image: it begins a tree of its own",
		w.Runners[d.open[0]], len(d.open))
}

// drawnAddresses bounds the addresses that one look at the pool draws.
const drawnAddresses = 16384

// draw is a search for free addresses.
type draw struct {
	wanted controller.AddressesWanted
	out    []string        // the address for each of wanted.Runners; empty: not found yet
	open   []int           // indexes of out without an address
	seen   map[string]bool // addresses that are not drawn again
}

// runners are the runners that still need addresses, each as often as it needs one.
func (d *draw) runners() []string {
	list := make([]string, len(d.open))
	for i, at := range d.open {
		list[i] = string(d.wanted.Runners[at])
	}
	return list
}

func (d *draw) candidates(n int) []string {
	list := make([]string, 0, min(n, drawnAddresses))
	for tries := 0; len(list) < cap(list) && tries < 2*drawnAddresses; tries++ {
		ip := fmt.Sprintf("10.83.%d.%d", 1+rand.IntN(255), rand.IntN(256)) //nolint:gosec // G404: an address is not a secret
		if !d.seen[ip] {
			d.seen[ip] = true
			list = append(list, ip)
		}
	}
	return list
}

// take assigns the addresses that were found to the open places of the same runner.
func (d *draw) take(rows []addressRow) {
	free := map[core.RunnerID][]string{}
	for _, r := range rows {
		free[r.RunnerID] = append(free[r.RunnerID], r.IP)
	}
	d.open = slices.DeleteFunc(d.open, func(at int) bool {
		list := free[d.wanted.Runners[at]]
		if len(list) == 0 {
			return false
		}
		d.out[at], free[d.wanted.Runners[at]] = list[0], list[1:]
		return true
	})
}

// InsertSandboxes inserts planned sandboxes.
func (t *tx) InsertSandboxes(list []controller.Sandbox) {
	rows := make([]sandboxRow, len(list))
	for i, s := range list {
		rows[i] = sandboxRow{
			ID: s.ID, ProjectID: s.ProjectID, WorkspaceID: s.WorkspaceID, Epoch: s.Epoch, RunnerID: s.RunnerID, VCPUs: s.Resources.VCPUs,
			MemoryMiB: s.Resources.MemoryMiB, Generation: s.Identity.Generation, Hostname: s.Identity.Hostname,
			MachineID: s.Identity.MachineID, MAC: s.Identity.MAC, IP: s.Identity.IP.String(), Tree: s.Tree,
		}
	}
	t.Soon(`
		INSERT INTO sandboxes (id, project_id, workspace_id, epoch, runner_id, vcpus, memory_mib, generation, hostname, machine_id, mac, ip, tree_id)
		SELECT * FROM jsonb_to_recordset(@rows::jsonb) AS v (id text, project_id text, workspace_id text, epoch bigint, runner_id text,
			vcpus int, memory_mib int, generation text, hostname text, machine_id text, mac text, ip text, tree_id text)`, pgtx.Args{"rows": rows})
}

func (t *tx) sandboxes(ctx context.Context, where string, a pgtx.Args) ([]controller.Sandbox, error) {
	rows, err := pgtx.Many[sandboxRow](ctx, t, `SELECT`+sandboxColumns+` FROM sandboxes s CROSS JOIN LATERAL (SELECT * FROM runners x WHERE x.id = s.runner_id LIMIT 1) r WHERE `+where+` ORDER BY s.id`, a)
	if err != nil {
		return nil, err
	}
	list := make([]controller.Sandbox, len(rows))
	for i, r := range rows {
		if list[i], err = r.sandbox(); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// Sandboxes returns sandboxes by id.
func (t *tx) Sandboxes(ctx context.Context, ids []core.SandboxID) ([]controller.Sandbox, error) {
	return t.sandboxes(ctx, `s.id = ANY(@ids::text[])`, pgtx.Args{"ids": pgtx.Texts(ids)})
}

// EndedSandboxes returns those that have ended.
func (t *tx) EndedSandboxes(ctx context.Context, ids []core.SandboxID) ([]controller.Sandbox, error) {
	return t.sandboxes(ctx, `s.id = ANY(@ids::text[]) AND s.ended_at IS NOT NULL`, pgtx.Args{"ids": pgtx.Texts(ids)})
}

// WorkspaceSandboxes returns the living sandboxes of a workspace. Their machines may run.
func (t *tx) WorkspaceSandboxes(ctx context.Context, id core.WorkspaceID) ([]controller.Sandbox, error) {
	return t.sandboxes(ctx, `s.workspace_id = @id AND s.ended_at IS NULL`, pgtx.Args{"id": id})
}

// EndSandboxes ends the rows of sandboxes, which frees their identities.
func (t *tx) EndSandboxes(ctx context.Context, ids []core.SandboxID) error {
	_, err := t.Exec(ctx, `UPDATE sandboxes SET ended_at = now() WHERE id = ANY(@ids::text[]) AND ended_at IS NULL`, pgtx.Args{"ids": pgtx.Texts(ids)})
	return err
}

type newReseal struct {
	ProjectID    core.ProjectID      `json:"project_id"`
	WorkspaceID  core.WorkspaceID    `json:"workspace_id"`
	SandboxID    core.SandboxID      `json:"sandbox_id"`
	OperationID  core.OperationID    `json:"operation_id"`
	CheckpointID core.CheckpointID   `json:"checkpoint_id"`
	Generation   string              `json:"generation"`
	Complete     bool                `json:"complete"`
	Steps        []core.ResealStep   `json:"steps"`
	Stale        []core.StaleProcess `json:"stale_processes"`
	DurationMS   float64             `json:"duration_ms"`
}

// InsertReseals appends reports.
func (t *tx) InsertReseals(list []controller.ResealRecord) {
	if len(list) == 0 {
		return
	}
	rows := make([]newReseal, len(list))
	for i, r := range list {
		rows[i] = newReseal{
			ProjectID: r.ProjectID, WorkspaceID: r.WorkspaceID, SandboxID: r.SandboxID, OperationID: r.OperationID, CheckpointID: r.CheckpointID,
			Generation: r.Report.Generation, Complete: r.Report.Complete, Steps: pgtx.OrNone(r.Report.Steps),
			Stale: pgtx.OrNone(r.Report.StaleProcesses), DurationMS: r.Report.DurationMS,
		}
	}
	t.Soon(`
		INSERT INTO reseal_reports (project_id, workspace_id, sandbox_id, operation_id, checkpoint_id, generation, complete, steps, stale_processes, duration_ms)
		SELECT * FROM jsonb_to_recordset(@rows::jsonb) AS v (project_id text, workspace_id text, sandbox_id text, operation_id text,
			checkpoint_id text, generation text, complete boolean, steps jsonb, stale_processes jsonb, duration_ms float8)`, pgtx.Args{"rows": rows})
	t.insertAttestations(list)
}

const resealColumns = `
	p.project_id, p.workspace_id, p.sandbox_id, s.epoch, p.operation_id, p.checkpoint_id, p.generation, p.complete, p.steps,
	p.stale_processes, p.duration_ms, p.created_at`

type resealRow struct {
	ProjectID    core.ProjectID      `db:"project_id"`
	WorkspaceID  core.WorkspaceID    `db:"workspace_id"`
	SandboxID    core.SandboxID      `db:"sandbox_id"`
	Epoch        int64               `db:"epoch"`
	OperationID  core.OperationID    `db:"operation_id"`
	CheckpointID core.CheckpointID   `db:"checkpoint_id"`
	Generation   string              `db:"generation"`
	Complete     bool                `db:"complete"`
	Steps        []core.ResealStep   `db:"steps"`
	Stale        []core.StaleProcess `db:"stale_processes"`
	DurationMS   float64             `db:"duration_ms"`
	CreatedAt    time.Time           `db:"created_at"`
}

func reseals(rows []resealRow, err error) ([]controller.ResealRecord, error) {
	list := make([]controller.ResealRecord, len(rows))
	for i, r := range rows {
		list[i] = controller.ResealRecord{
			ProjectID: r.ProjectID, WorkspaceID: r.WorkspaceID, SandboxID: r.SandboxID, Epoch: r.Epoch, CheckpointID: r.CheckpointID,
			OperationID: r.OperationID, CreatedAt: r.CreatedAt,
			Report: core.ResealReport{Generation: r.Generation, Complete: r.Complete, Steps: r.Steps, StaleProcesses: r.Stale, DurationMS: r.DurationMS},
		}
	}
	return list, err
}

// Reseals lists the reports of a workspace. Pages are in the order of sandbox ids, which is the order of age.
func (t *tx) Reseals(ctx context.Context, id core.WorkspaceID, p controller.Page) ([]controller.ResealRecord, error) {
	return reseals(pgtx.Many[resealRow](ctx, t, `
		SELECT`+resealColumns+` FROM reseal_reports p JOIN sandboxes s ON s.id = p.sandbox_id
		WHERE p.workspace_id = @id AND (@after::text = '' OR p.sandbox_id < @after) ORDER BY p.sandbox_id DESC LIMIT @limit`,
		pgtx.Args{"id": id, "after": p.After, "limit": p.Limit}))
}

// ResealsByOperation returns the reports that an operation wrote about workspaces.
func (t *tx) ResealsByOperation(ctx context.Context, op core.OperationID, workspaces []core.WorkspaceID) ([]controller.ResealRecord, error) {
	return reseals(pgtx.Many[resealRow](ctx, t, `
		SELECT`+resealColumns+` FROM reseal_reports p JOIN sandboxes s ON s.id = p.sandbox_id
		WHERE p.workspace_id = ANY(@ids::text[]) AND p.operation_id = @op`, pgtx.Args{"ids": pgtx.Texts(workspaces), "op": op}))
}
