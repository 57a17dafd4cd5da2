package fleetrows

import (
	"context"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// usedColumns need the relation l (a runner's load).
const usedColumns = ` l.sandboxes AS used_sandboxes, l.vcpus AS used_vcpus, l.memory_mib AS used_memory_mib`

type usedRow struct {
	Sandboxes int `db:"used_sandboxes"`
	VCPUs     int `db:"used_vcpus"`
	MemoryMiB int `db:"used_memory_mib"`
}

func (r usedRow) capacity() runnerapi.Capacity {
	return runnerapi.Capacity{Sandboxes: r.Sandboxes, VCPUs: r.VCPUs, MemoryMiB: r.MemoryMiB}
}

type loadedRow struct {
	runnerRow
	usedRow
	ImagesSum string `db:"images_sum"`
}

// placed reads the runners of some loads, in the order of the loads. Those that were given up are left out.
func (t *Tx) placed(ctx context.Context, loads string, a pgtx.Args) ([]controller.Runner, error) {
	rows, err := pgtx.ByIndex[loadedRow](ctx, t, `
		SELECT`+runnerColumns+`,`+usedColumns+`, l.images_sum FROM (`+loads+`) l
		CROSS JOIN LATERAL (SELECT * FROM runners x WHERE x.id = l.runner_id AND x.fenced_at IS NULL LIMIT 1) r ORDER BY l.fill, l.runner_id`, a)
	list := make([]controller.Runner, len(rows))
	for i, r := range rows {
		list[i] = r.runner()
		list[i].Used, list[i].ImagesSum = r.capacity(), r.ImagesSum
	}
	return list, err
}

// LoadedRunners looks up each.
func (t *Tx) LoadedRunners(ctx context.Context, ids []core.RunnerID) ([]controller.Runner, error) {
	return t.placed(ctx, `
		SELECT k.* FROM unnest(@ids::text[]) AS asked (id) CROSS JOIN LATERAL (SELECT * FROM runner_loads x WHERE x.runner_id = asked.id LIMIT 1) k`,
		pgtx.Args{"ids": pgtx.Texts(ids)})
}

// holdsImage is a probe of the key for each load. OFFSET 0 keeps it one: see workspaceJoins.
const holdsImage = ` AND EXISTS (SELECT 1 FROM image_locations il WHERE il.runner_id = k.runner_id AND il.image_id = ANY(@images::text[]) OFFSET 0)`

// EmptiestRunners reads the loads in the order of an index and stops at the limit.
func (t *Tx) EmptiestRunners(ctx context.Context, f controller.EmptiestFilter) ([]controller.Runner, error) {
	a := pgtx.Args{"limit": f.Limit}
	where := `k.open`
	if f.Class != nil {
		where += ` AND k.class_key = @class`
		a["class"] = pgtx.ClassKey(*f.Class)
	}
	if f.NotFull {
		where += ` AND k.fill < 16`
	}
	if len(f.Images) > 0 {
		where += holdsImage
		a["images"] = pgtx.Texts(f.Images)
	}
	if f.Fits != nil {
		where += ` AND (k.cap_sandboxes = 0 OR k.cap_sandboxes >= 1) AND (k.cap_vcpus = 0 OR k.cap_vcpus >= @vcpus::bigint) AND (k.cap_memory_mib = 0 OR k.cap_memory_mib >= @memory::bigint)`
		a["vcpus"], a["memory"] = f.Fits.VCPUs, f.Fits.MemoryMiB
	}
	if f.Fresh {
		where += ` AND EXISTS (SELECT 1 FROM runners y WHERE y.id = k.runner_id AND y.lease_expires_at > now() AND y.fenced_at IS NULL OFFSET 0)`
	}
	return t.placed(ctx, `SELECT k.* FROM runner_loads k WHERE `+where+` ORDER BY k.fill, k.runner_id LIMIT @limit`, a)
}

// ImageHolders reads at most limit.
func (t *Tx) ImageHolders(ctx context.Context, image core.Digest, limit int) (ids []core.ImageID, holders []core.RunnerID, err error) {
	rows, err := pgtx.ByIndex[imageHolderRow](ctx, t, `
		SELECT i.id, l.runner_id FROM (SELECT id FROM images WHERE project_id = @system AND digest = @image) i CROSS JOIN LATERAL (
			SELECT DISTINCT runner_id FROM (SELECT x.runner_id FROM image_locations x WHERE x.image_id = i.id LIMIT @limit) AS few
		) l ORDER BY l.runner_id`, pgtx.Args{"system": controller.SystemProject, "image": image, "limit": limit})
	for _, r := range rows {
		if len(ids) == 0 {
			ids = append(ids, r.ID) // the key of images is project and digest
		}
		holders = append(holders, r.RunnerID)
	}
	return ids, holders, err
}

type imageHolderRow struct {
	ID       core.ImageID  `db:"id"`
	RunnerID core.RunnerID `db:"runner_id"`
}

// Reachable stops at the first.
func (t *Tx) Reachable(ctx context.Context) (bool, error) {
	rows, err := pgtx.AsSystem[string](ctx, t, `SELECT r.endpoint FROM runners r WHERE r.lease_expires_at > now() AND r.fenced_at IS NULL LIMIT 1`, pgtx.Args{})
	return len(rows) > 0, err
}

// BothHolder follows the copies of the two in the order of their key.
func (t *Tx) BothHolder(ctx context.Context, a, b core.CheckpointID) (string, error) {
	rows, err := pgtx.Many[string](ctx, t, `
		SELECT r.endpoint FROM checkpoint_copies x JOIN checkpoint_copies y ON y.runner_id = x.runner_id AND y.checkpoint_id = @b
		CROSS JOIN LATERAL (SELECT * FROM runners z WHERE z.id = x.runner_id AND z.lease_expires_at > now() AND z.fenced_at IS NULL LIMIT 1) r
		WHERE x.checkpoint_id = @a ORDER BY x.runner_id LIMIT 1`, pgtx.Args{"a": a, "b": b})
	if err != nil || len(rows) == 0 {
		return "", err
	}
	return rows[0], nil
}

// Occupied reads the row of the runner's load. The insertion has changed this row and so locked it: later placements on the runner wait for
// this transaction.
func (t *Tx) Occupied(ctx context.Context, runner core.RunnerID) (runnerapi.Capacity, error) {
	rows, err := pgtx.AsSystem[usedRow](ctx, t, `SELECT`+usedColumns+` FROM runner_loads l WHERE l.runner_id = @runner`, pgtx.Args{"runner": runner})
	if err != nil || len(rows) != 1 {
		return runnerapi.Capacity{}, err
	}
	return rows[0].capacity(), nil
}
