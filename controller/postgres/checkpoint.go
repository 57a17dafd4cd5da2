package postgres

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// The columns of a checkpoint need the relations c (a checkpoint) and r (the runner that holds it, if any). Of a single one
// the children are counted in place; of a page, all at once afterwards, which costs a fraction.
var (
	checkpointColumns = pageColumns + `,
	(SELECT count(*) FROM checkpoints k WHERE k.parent_id = c.id AND k.state IN (` + living + `)) AS children_count`
	living = pgtx.Quoted(core.CheckpointCaptured, core.CheckpointSealed)
)

const pageColumns = `
	c.id, c.project_id, c.kind, c.state, coalesce(c.parent_id, '') AS parent_id, coalesce(c.parent_project_id, '') AS parent_project_id, c.root_id, c.depth,
	coalesce(c.workspace_id, '') AS workspace_id, coalesce(c.workspace_epoch, 0) AS workspace_epoch, coalesce(c.name, '') AS name,
	c.labels, c.annotations, c.pinned, c.version, c.image_name, c.image_digest, c.vcpus, c.memory_mib, c.disk_gib,
	coalesce(c.runner_id, '') AS runner_id, coalesce(r.endpoint, '') AS endpoint, c.runner_class, coalesce(c.base_id, '') AS base_id,
	c.delta_bytes, c.device_state_bytes, c.disk_bytes, c.pause_ms, c.timings, c.parent_reseal, c.stale_processes,
	coalesce(c.operation_id, '') AS operation_id, coalesce(c.failure_code, '') AS failure_code, coalesce(c.failure_message, '') AS failure_message,
	c.created_at, c.captured_at, c.sealed_at, c.ended_at, coalesce(c.manifest_key, '') AS manifest_key, coalesce(c.manifest_digest, '') AS manifest_digest,
	coalesce(c.manifest_bytes, 0) AS manifest_bytes, coalesce(c.stored_bytes, 0) AS stored_bytes,
	c.imported, coalesce(s.state, '') AS seal_state, coalesce(s.attempt, 0) AS seal_attempt, coalesce(s.problem_code, '') AS seal_code, coalesce(s.problem_message, '') AS seal_message`

// A runner is looked up by its key: see workspaceJoins.
const checkpointJoins = ` LEFT JOIN LATERAL (SELECT * FROM runners x WHERE x.id = c.runner_id LIMIT 1) r ON true
	LEFT JOIN LATERAL (SELECT * FROM seals x WHERE x.checkpoint_id = c.id AND c.state = 'captured' LIMIT 1) s ON true`

type checkpointRow struct {
	ID               core.CheckpointID             `db:"id"`
	ProjectID        core.ProjectID                `db:"project_id"`
	Kind             controller.CheckpointKind     `db:"kind"`
	State            core.CheckpointState          `db:"state"`
	Parent           core.CheckpointID             `db:"parent_id"`
	ParentProject    core.ProjectID                `db:"parent_project_id"`
	Root             core.CheckpointID             `db:"root_id"`
	Depth            int                           `db:"depth"`
	WorkspaceID      core.WorkspaceID              `db:"workspace_id"`
	WorkspaceEpoch   int64                         `db:"workspace_epoch"`
	Name             string                        `db:"name"`
	Labels           pgtx.Object[string]           `db:"labels"`
	Annotations      pgtx.Object[json.RawMessage]  `db:"annotations"`
	Pinned           bool                          `db:"pinned"`
	Version          int64                         `db:"version"`
	ImageName        string                        `db:"image_name"`
	ImageDigest      core.Digest                   `db:"image_digest"`
	VCPUs            int                           `db:"vcpus"`
	MemoryMiB        int                           `db:"memory_mib"`
	DiskGiB          int                           `db:"disk_gib"`
	RunnerID         core.RunnerID                 `db:"runner_id"`
	Endpoint         string                        `db:"endpoint"`
	Class            pgtx.ClassCell                `db:"runner_class"`
	Base             core.BaseID                   `db:"base_id"`
	DeltaBytes       int64                         `db:"delta_bytes"`
	DeviceStateBytes int64                         `db:"device_state_bytes"`
	DiskBytes        int64                         `db:"disk_bytes"`
	PauseMS          float64                       `db:"pause_ms"`
	Timings          pgtx.Array[core.Timing]       `db:"timings"`
	ParentReseal     pgtx.Array[core.ResealStep]   `db:"parent_reseal"`
	Stale            pgtx.Array[core.StaleProcess] `db:"stale_processes"`
	ChildrenCount    int                           `db:"children_count"`
	OperationID      core.OperationID              `db:"operation_id"`
	FailureCode      core.Code                     `db:"failure_code"`
	FailureMessage   string                        `db:"failure_message"`
	CreatedAt        time.Time                     `db:"created_at"`
	CapturedAt       *time.Time                    `db:"captured_at"`
	SealedAt         *time.Time                    `db:"sealed_at"`
	EndedAt          *time.Time                    `db:"ended_at"`
	ManifestKey      string                        `db:"manifest_key"`
	ManifestDigest   core.Digest                   `db:"manifest_digest"`
	ManifestBytes    int64                         `db:"manifest_bytes"`
	StoredBytes      int64                         `db:"stored_bytes"`
	Imported         *controller.Imported          `db:"imported"`
	SealState        controller.SealState          `db:"seal_state"`
	SealAttempt      int64                         `db:"seal_attempt"`
	SealCode         core.Code                     `db:"seal_code"`
	SealMessage      string                        `db:"seal_message"`
}

func (r checkpointRow) checkpoint() controller.Checkpoint {
	c := controller.Checkpoint{
		ID: r.ID, ProjectID: r.ProjectID, Kind: r.Kind, State: r.State, Parent: r.Parent, ParentProject: r.ParentProject, Root: r.Root, Depth: r.Depth,
		WorkspaceID: r.WorkspaceID, WorkspaceEpoch: r.WorkspaceEpoch, Name: r.Name, Labels: r.Labels, Annotations: r.Annotations, Pinned: r.Pinned, Version: r.Version,
		Image:     controller.ImageRef{Name: r.ImageName, Digest: r.ImageDigest},
		Resources: core.Resources{VCPUs: r.VCPUs, MemoryMiB: r.MemoryMiB, DiskGiB: r.DiskGiB},
		RunnerID:  r.RunnerID, Endpoint: r.Endpoint, Class: r.Class.RunnerClass, Base: r.Base, DeltaBytes: r.DeltaBytes, DeviceStateBytes: r.DeviceStateBytes,
		DiskBytes: r.DiskBytes, PauseMS: r.PauseMS, Timings: r.Timings, ParentReseal: r.ParentReseal, StaleProcesses: r.Stale,
		ChildrenCount: r.ChildrenCount, OperationID: r.OperationID,
		CreatedAt: r.CreatedAt, CapturedAt: pgtx.TimeOf(r.CapturedAt), SealedAt: pgtx.TimeOf(r.SealedAt), EndedAt: pgtx.TimeOf(r.EndedAt), StoredBytes: r.StoredBytes,
		Imported: r.Imported,
	}
	if r.ManifestKey != "" {
		c.Stored = &runnerapi.Stored{CheckpointID: r.ID, Manifest: r.ManifestKey, Digest: r.ManifestDigest, Bytes: r.ManifestBytes}
	}
	if r.SealState != "" {
		c.Seal = &controller.Seal{State: r.SealState, Attempt: r.SealAttempt}
		if r.SealCode != "" {
			c.Seal.Problem = &controller.Failure{Code: r.SealCode, Message: r.SealMessage}
		}
	}
	if r.FailureCode != "" {
		c.Failure = &controller.Failure{Code: r.FailureCode, Message: r.FailureMessage}
	}
	return c
}

func checkpoints(rows []checkpointRow, err error) ([]controller.Checkpoint, error) {
	if err != nil {
		return nil, err
	}
	list := make([]controller.Checkpoint, len(rows))
	for i, r := range rows {
		list[i] = r.checkpoint()
	}
	return list, nil
}

func noCheckpoint(id core.CheckpointID) error {
	return core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "there is no checkpoint %s", id)
}

// LockCheckpoint and PutProjectImage exclude DeleteCheckpoint by an advisory lock, which works on shared rows too: row locks need
// the right to write.
func (t *tx) LockCheckpoint(id core.CheckpointID) {
	t.Soon(`SELECT pg_advisory_xact_lock_shared(hashtextextended(@id::text, 0))`, pgtx.Args{"id": id})
}

type checkpointWithSourceRow struct {
	checkpointRow
	Egress  core.EgressPolicy `db:"egress_policy"`
	Allow   []string          `db:"egress_allow"`
	Granted bool              `db:"granted"`
	Publish bool              `db:"published"`
	Env     map[string]string `db:"env"`
	Tree    string            `db:"tree"`
	Address string            `db:"address"`
}

// Checkpoint returns one, with what its forks take over from the workspace that it was taken of. What descends from one that was taken of
// none (a template, or one that was imported) is a tree of the project.
func (t *tx) Checkpoint(ctx context.Context, id core.CheckpointID) (controller.Checkpoint, error) {
	row, err := pgtx.One[checkpointWithSourceRow](ctx, t, noCheckpoint(id), `
		SELECT`+checkpointColumns+`, coalesce(w.egress_policy, @deny::text) AS egress_policy, coalesce(w.egress_allow, '{}') AS egress_allow, w.grants_until IS NOT NULL AS granted, coalesce(w.env, '{}') AS env, c.published,
			CASE WHEN c.workspace_id IS NULL THEN @project::text || ' ' || c.id ELSE coalesce(nullif(b.tree_id, ''), c.project_id) END AS tree, coalesce(b.ip, '') AS address
		FROM checkpoints c`+checkpointJoins+` LEFT JOIN workspaces w ON w.id = c.workspace_id
			LEFT JOIN LATERAL (SELECT * FROM sandboxes x WHERE x.id = c.sandbox_id LIMIT 1) b ON true
		WHERE c.id = @id AND NOT c.pruned`,
		pgtx.Args{"id": id, "deny": core.EgressDenyAll, "project": t.Scope().String()})
	if err != nil {
		return controller.Checkpoint{}, err
	}
	c := row.checkpoint()
	c.Egress, c.Allow, c.Granted, c.Env, c.Tree, c.Address = row.Egress, row.Allow, row.Granted, row.Env, row.Tree, row.Address
	c.Published = row.Publish
	return c, nil
}

// Checkpoints lists.
func (t *tx) Checkpoints(ctx context.Context, f controller.CheckpointFilter) ([]controller.Checkpoint, error) {
	q := pgtx.NewFilter("c", f.Page, f.OldestFirst)
	q.Equal("name", f.Name)
	q.Equal("kind", string(f.Kind))
	q.Equal("workspace_id", string(f.WorkspaceID))
	q.Equal("parent_id", string(f.Parent))
	q.Suffix(f.IDSuffix)
	q.AnyOf("state", pgtx.Texts(f.States))
	q.Labels(f.Labels)
	q.Add("NOT c.pruned", "", nil)
	return t.page(ctx, `SELECT`+pageColumns+`, 0 AS children_count FROM checkpoints c`+checkpointJoins+q.Where()+q.Tail(), q.Args)
}

type countRow struct {
	ID    core.CheckpointID `db:"parent_id"`
	Count int               `db:"count"`
}

// children counts what lives directly below each of the nodes.
func (t *tx) children(ctx context.Context, ids []core.CheckpointID) (map[core.CheckpointID]int, error) {
	rows, err := pgtx.Many[countRow](ctx, t, `
		SELECT k.parent_id, count(*) AS count FROM checkpoints k WHERE k.parent_id = ANY(@ids::text[]) AND k.state IN (`+living+`) GROUP BY k.parent_id`,
		pgtx.Args{"ids": pgtx.Texts(ids)})
	counts := make(map[core.CheckpointID]int, len(rows))
	for _, r := range rows {
		counts[r.ID] = r.Count
	}
	return counts, err
}

// page runs a query for many checkpoints and counts their children.
func (t *tx) page(ctx context.Context, sql string, a pgtx.Args) ([]controller.Checkpoint, error) {
	list, err := checkpoints(pgtx.Many[checkpointRow](ctx, t, sql, a))
	if err != nil || len(list) == 0 {
		return list, err
	}
	ids := make([]core.CheckpointID, len(list))
	for i, c := range list {
		ids[i] = c.ID
	}
	counts, err := t.children(ctx, ids)
	for i := range list {
		list[i].ChildrenCount = counts[list[i].ID]
	}
	return list, err
}

// LiveTemplate finds a template. It does not count the children: every workspace of the image has its first checkpoint there.
func (t *tx) LiveTemplate(ctx context.Context, runner controller.Runner, image core.Digest, res core.Resources, local bool) (controller.Checkpoint, error) {
	absent := core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "there is no template of image %s for this shape yet", image.Short())
	row, err := pgtx.One[checkpointRow](ctx, t, absent, `
		WITH found AS (
			SELECT id, CASE WHEN state = 'capturing' THEN 2 ELSE 0 END AS rank FROM checkpoints
			WHERE kind = 'template' AND state IN ('capturing', 'captured', 'sealed') AND runner_id = @runner
				AND image_digest = @image AND class_key = @class AND vcpus = @vcpus AND memory_mib = @memory
			UNION ALL
			(SELECT id, 1 FROM checkpoints WHERE NOT @local AND kind = 'template' AND state = 'sealed'
				AND image_digest = @image AND class_key = @class AND vcpus = @vcpus AND memory_mib = @memory LIMIT 1)
		)
		SELECT`+pageColumns+`, 0 AS children_count FROM (SELECT id FROM found ORDER BY rank LIMIT 1) f JOIN checkpoints c ON c.id = f.id`+checkpointJoins,
		pgtx.Args{
			"runner": runner.Info.RunnerID, "image": image, "class": pgtx.ClassKey(runner.Info.Class), "vcpus": res.VCPUs, "memory": res.MemoryMiB, "local": local,
		})
	return row.checkpoint(), err
}

// InsertCheckpoint inserts a node that is being captured. Its place in the tree follows from its parent. An ancestor that
// was deleted and no longer shown is shown again, because it is an ancestor again.
func (t *tx) InsertCheckpoint(ctx context.Context, c controller.Checkpoint) error {
	a := pgtx.Args{
		"id": c.ID, "project": c.ProjectID, "kind": c.Kind, "state": core.CheckpointCapturing, "shared": c.Kind == controller.KindTemplate,
		"parent": pgtx.OrNull(c.Parent), "workspace": pgtx.OrNull(c.WorkspaceID), "epoch": nil, "sandbox": pgtx.OrNull(c.SandboxID), "name": pgtx.OrNull(c.Name), "labels": pgtx.OrEmpty(c.Labels),
		"annotations": pgtx.OrEmpty(c.Annotations), "image_name": c.Image.Name, "image": c.Image.Digest, "vcpus": c.Resources.VCPUs,
		"memory": c.Resources.MemoryMiB, "disk": c.Resources.DiskGiB, "runner": pgtx.OrNull(c.RunnerID), "class": c.Class, "class_key": nil, "op": pgtx.OrNull(c.OperationID), "pinned": c.Pinned,
		"imported": c.Imported,
	}
	if c.WorkspaceID != "" {
		a["epoch"] = c.WorkspaceEpoch
	}
	if c.Class != nil {
		a["class_key"] = pgtx.ClassKey(*c.Class)
	}
	_, err := t.Exec(ctx, `
		WITH RECURSIVE up AS (
			SELECT id, parent_id FROM checkpoints WHERE id = @parent AND pruned
			UNION ALL SELECT c.id, c.parent_id FROM checkpoints c JOIN up ON c.id = up.parent_id WHERE c.pruned
		), shown AS (
			UPDATE checkpoints SET pruned = false WHERE id IN (SELECT id FROM up)
		)
		INSERT INTO checkpoints (id, project_id, kind, state, shared, parent_project_id, parent_id, root_id, depth, workspace_id, workspace_epoch, sandbox_id,
			name, labels, annotations, image_name, image_digest, vcpus, memory_mib, disk_gib, runner_id, runner_class, class_key, operation_id, pinned, imported)
		SELECT @id, @project, @kind, @state, @shared, p.project_id, @parent, coalesce(p.root_id, @id), coalesce(p.depth + 1, 0), @workspace, @epoch, @sandbox,
			@name, @labels, @annotations, @image_name, @image, @vcpus, @memory, @disk, @runner, @class, @class_key, @op, @pinned, @imported
		FROM (SELECT 1) AS always LEFT JOIN checkpoints p ON p.id = @parent`, a)
	return err
}

// CaptureCheckpoint records what the runner captured. It changes nothing about a checkpoint that is not being captured.
func (t *tx) CaptureCheckpoint(ctx context.Context, id core.CheckpointID, runner core.RunnerID, got runnerapi.Checkpoint) (controller.Checkpoint, error) {
	conflict := core.Errorf(core.Conflict, core.CodeStateConflict, "checkpoint %s is not being captured any more", id)
	row, err := pgtx.One[checkpointRow](ctx, t, conflict, `
		WITH c AS (
			UPDATE checkpoints SET state = @to, captured_at = now(), runner_id = @runner, runner_class = @class, class_key = @class_key, base_id = @base,
				delta_bytes = @delta, device_state_bytes = @device, disk_bytes = @disk, pause_ms = @pause, timings = @timings,
				parent_reseal = @reseal, stale_processes = @stale, instant_at = @instant
			WHERE id = @id AND state = ANY(@from::text[]) RETURNING *
		), copy AS (
			INSERT INTO checkpoint_copies (checkpoint_id, runner_id, project_id, shared, id_sum) SELECT id, runner_id, project_id, shared, coppice_id_sum(id) FROM c
			ON CONFLICT DO NOTHING
		)
		SELECT`+checkpointColumns+` FROM c`+checkpointJoins,
		pgtx.Args{
			"id": id, "to": core.CheckpointCaptured, "from": pgtx.Texts(core.CheckpointCaptured.Sources()), "runner": runner, "class": got.Class,
			"class_key": pgtx.ClassKey(got.Class), "base": got.Base, "delta": got.DeltaBytes, "device": got.DeviceStateBytes, "disk": got.DiskBytes,
			"pause": got.PauseMS, "timings": pgtx.OrNone(got.Timings), "reseal": pgtx.OrNone(got.ParentReseal), "stale": pgtx.OrNone(got.Processes), "instant": got.CreatedAt,
		})
	return row.checkpoint(), err
}

// FailCheckpoint ends a capture that did not succeed.
func (t *tx) FailCheckpoint(ctx context.Context, id core.CheckpointID, why controller.Failure) error {
	_, err := t.Exec(ctx, `
		UPDATE checkpoints SET state = @to, ended_at = now(), failure_code = @code, failure_message = @message WHERE id = @id AND state = ANY(@from::text[])`,
		pgtx.Args{"id": id, "to": core.CheckpointFailed, "from": pgtx.Texts(core.CheckpointFailed.Sources()), "code": why.Code, "message": why.Message})
	return err
}

// DropTemplate makes room for another template of the same key.
func (t *tx) DropTemplate(ctx context.Context, id core.CheckpointID) error {
	_, err := t.Exec(ctx, `UPDATE checkpoints SET state = @to, ended_at = now() WHERE id = @id AND kind = 'template' AND state = ANY(@from::text[])`,
		pgtx.Args{"id": id, "to": core.CheckpointDeleted, "from": pgtx.Texts(core.CheckpointDeleted.Sources())})
	return err
}

type useRow struct {
	ID        core.CheckpointID    `db:"id"`
	State     core.CheckpointState `db:"state"`
	Endpoint  string               `db:"endpoint"`
	Operation string               `db:"operation"`
	Suspended string               `db:"suspended"`
	Living    string               `db:"living"`
	Pinned    bool                 `db:"pinned"`
	Image     string               `db:"image"`
}

// refusal says what a node is needed for; nil: for nothing.
func (u useRow) refusal() error {
	switch {
	case u.Pinned:
		return core.Errorf(core.FailedPrecondition, core.CodeCheckpointPinned, "checkpoint %s is pinned; unpin it first", u.ID)
	case u.Image != "":
		return core.Errorf(core.FailedPrecondition, core.CodeCheckpointInUse, "checkpoint %s is the image %s; delete the image first, or build another one with its name", u.ID, u.Image)
	case u.Operation != "":
		return core.Errorf(core.FailedPrecondition, core.CodeCheckpointInUse, "checkpoint %s is in use by operation %s; delete it when that has ended", u.ID, u.Operation)
	case u.Suspended != "":
		return core.Errorf(core.FailedPrecondition, core.CodeCheckpointInUse, "workspace %s is suspended as checkpoint %s; resume or terminate it first", u.Suspended, u.ID)
	case u.Living != "":
		return core.Errorf(core.FailedPrecondition, core.CodeCheckpointInUse, "checkpoint %s is the source of workspace %s", u.ID, u.Living)
	}
	return nil
}

// uses says what nodes are needed for, those that are shown and those that never were. It locks them against new forks, in the order of
// their ids.
func (t *tx) uses(ctx context.Context, ids []core.CheckpointID, spare bool) ([]useRow, error) {
	ids = slices.Clone(ids)
	slices.Sort(ids)
	a := pgtx.Args{"ids": pgtx.Texts(ids), "spare": spare}
	if _, err := t.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtextextended(o.id, 0)) FROM (SELECT u.id FROM unnest(@ids::text[]) WITH ORDINALITY AS u (id, n) ORDER BY u.n) AS o`,
		pgtx.Args{"ids": a["ids"]}); err != nil {
		return nil, err
	}
	return pgtx.Many[useRow](ctx, t, `
		SELECT c.id, c.state, coalesce((SELECT r.endpoint FROM runners r WHERE r.id = c.runner_id AND r.fenced_at IS NULL AND r.removed_at IS NULL), '') AS endpoint,
			coalesce((SELECT o.id FROM operations o WHERE o.checkpoint_id = c.id AND o.state IN ('pending', 'running') LIMIT 1), '') AS operation,
			coalesce((SELECT w.id FROM workspaces w WHERE w.checkpoint_id = c.id AND `+asleep+` AND w.ended_at IS NULL LIMIT 1), '') AS suspended,
			coalesce((SELECT w.id FROM workspaces w WHERE @spare AND w.checkpoint_id = c.id AND w.ended_at IS NULL LIMIT 1),
				(SELECT w.id FROM workspaces w WHERE @spare AND w.parent_checkpoint_id = c.id AND w.ended_at IS NULL LIMIT 1), '') AS living,
			c.pinned AND c.state IN (`+living+`) AS pinned,
			coalesce((SELECT i.name FROM project_images i WHERE i.checkpoint_id = c.id AND c.state IN (`+living+`) LIMIT 1), '') AS image
		FROM unnest(@ids::text[]) AS u (id) CROSS JOIN LATERAL (SELECT * FROM checkpoints x WHERE x.id = u.id LIMIT 1) c WHERE NOT c.pruned`, a)
}

// asleep is the condition that a workspace w is suspended, or is being restored in place and would be suspended again if that failed. Its
// head is all that there is of it.
const asleep = `(w.state = 'suspended' OR w.state = 'restoring' AND w.sandbox_id IS NULL)`

// setDeleted changes the state. What came into use since it was looked at does not meet the conditions of the change.
const setDeleted = `
	UPDATE checkpoints SET state = @to, ended_at = coalesce(ended_at, now())
	WHERE id = ANY(@ids::text[]) AND state = ANY(@from::text[]) AND (state = 'failed'
			OR NOT pinned AND NOT EXISTS (SELECT 1 FROM project_images i WHERE i.checkpoint_id = checkpoints.id))
		AND NOT EXISTS (SELECT 1 FROM workspaces w WHERE w.checkpoint_id = checkpoints.id AND ` + asleep + ` AND w.ended_at IS NULL)`

func deletedOf(ids ...core.CheckpointID) pgtx.Args {
	return pgtx.Args{"ids": pgtx.Texts(ids), "to": core.CheckpointDeleted, "from": pgtx.Texts(core.CheckpointDeleted.Sources())}
}

// DeleteCheckpoint marks a node deleted and stops showing what nobody's ancestor is.
func (t *tx) DeleteCheckpoint(ctx context.Context, id core.CheckpointID, spare bool) (controller.Checkpoint, error) {
	uses, err := t.uses(ctx, []core.CheckpointID{id}, spare)
	if err == nil && len(uses) == 1 {
		err = uses[0].refusal()
	}
	if err != nil {
		return controller.Checkpoint{}, err
	}
	rows, err := pgtx.Many[checkpointRow](ctx, t, `WITH c AS (`+setDeleted+` RETURNING *) SELECT`+checkpointColumns+` FROM c`+checkpointJoins, deletedOf(id))
	if err != nil {
		return controller.Checkpoint{}, err
	}
	if len(rows) == 0 {
		return t.Checkpoint(ctx, id)
	}
	return rows[0].checkpoint(), t.prune(ctx, []core.CheckpointID{id})
}

// DeleteCheckpoints does that with many, with a few statements for all of them.
func (t *tx) DeleteCheckpoints(ctx context.Context, ids []core.CheckpointID, spare bool) ([]controller.Deletion, error) {
	uses, err := t.uses(ctx, ids, spare)
	if err != nil {
		return nil, err
	}
	list, free := make([]controller.Deletion, len(uses)), make([]core.CheckpointID, 0, len(uses))
	for i, u := range uses {
		list[i] = controller.Deletion{Checkpoint: u.ID, Endpoint: u.Endpoint, Gone: u.State == core.CheckpointDeleted, Refused: u.refusal()}
		if list[i].Refused == nil && !list[i].Gone {
			free = append(free, u.ID)
		}
	}
	rows, err := pgtx.Many[struct {
		ID core.CheckpointID `db:"id"`
	}](ctx, t, setDeleted+` RETURNING id`, deletedOf(free...))
	if err != nil {
		return nil, err
	}
	gone := make(map[core.CheckpointID]bool, len(rows))
	for _, r := range rows {
		gone[r.ID] = true
	}
	for i := range list {
		list[i].Gone = list[i].Gone || gone[list[i].Checkpoint]
	}
	return list, t.prune(ctx, slices.Collect(maps.Keys(gone)))
}

const (
	pruneLevels = 500  // generations of one statement
	pruneMost   = 2000 // rows of one transaction, about; the sweep does the rest
)

// pruneUp hides deleted nodes that have no visible descendants and are no living workspace's head. Then it does the same with their
// ancestors, until one has another visible child. It returns the hidden nodes with their parents.
const pruneUp = `
	WITH RECURSIVE up AS (
		SELECT c.id, c.parent_id, 1 AS n FROM unnest(@ids::text[]) AS u (id) CROSS JOIN LATERAL (SELECT * FROM checkpoints x WHERE x.id = u.id LIMIT 1) c
		WHERE c.state = 'deleted' AND NOT c.pruned
			AND NOT EXISTS (SELECT 1 FROM checkpoints k WHERE k.parent_id = c.id AND NOT k.pruned AND k.state <> 'failed')
			AND NOT EXISTS (SELECT 1 FROM workspaces w WHERE w.checkpoint_id = c.id AND w.ended_at IS NULL)
		UNION ALL
		SELECT p.id, p.parent_id, up.n + 1 FROM up CROSS JOIN LATERAL (SELECT * FROM checkpoints x WHERE x.id = up.parent_id LIMIT 1) p
		WHERE up.n < @levels::int AND p.state = 'deleted' AND NOT p.pruned
			AND NOT EXISTS (SELECT 1 FROM checkpoints k WHERE k.parent_id = p.id AND k.id <> up.id AND NOT k.pruned AND k.state <> 'failed')
			AND NOT EXISTS (SELECT 1 FROM workspaces w WHERE w.checkpoint_id = p.id AND w.ended_at IS NULL)
	)
	UPDATE checkpoints c SET pruned = true WHERE c.id = ANY(ARRAY(SELECT up.id FROM up)) AND c.state = 'deleted' AND NOT c.pruned
		AND NOT EXISTS (SELECT 1 FROM workspaces w WHERE w.checkpoint_id = c.id AND w.ended_at IS NULL)
	RETURNING c.id, coalesce(c.parent_id, '') AS parent_id`

type prunedRow struct {
	ID     core.CheckpointID `db:"id"`
	Parent core.CheckpointID `db:"parent_id"`
}

// prune stops showing these nodes and their ancestors where nothing needs them.
func (t *tx) prune(ctx context.Context, ids []core.CheckpointID) error {
	for sum := 0; len(ids) > 0 && sum < pruneMost; {
		rows, err := pgtx.Many[prunedRow](ctx, t, pruneUp, pgtx.Args{"ids": pgtx.Texts(ids), "levels": pruneLevels})
		if err != nil {
			return err
		}
		sum += len(rows)
		done := make(map[core.CheckpointID]bool, len(rows))
		for _, r := range rows {
			done[r.ID] = true
		}
		ids = nil
		for _, r := range rows {
			if r.Parent != "" && !done[r.Parent] {
				done[r.Parent], ids = true, append(ids, r.Parent)
			}
		}
	}
	return nil
}

// PatchCheckpoint changes name, labels and annotations.
func (t *tx) PatchCheckpoint(ctx context.Context, id core.CheckpointID, p controller.CheckpointPatch) (controller.Checkpoint, error) {
	set, drop := pgtx.Split(p.Labels)
	note, forget := map[string]json.RawMessage{}, []string{}
	for k, v := range p.Annotations {
		if len(v) == 0 || string(v) == "null" {
			forget = append(forget, k)
		} else {
			note[k] = v
		}
	}
	name := ""
	if p.Name != nil {
		name = *p.Name
	}
	rows, err := checkpoints(pgtx.Many[checkpointRow](ctx, t, `
		WITH c AS (
			UPDATE checkpoints SET version = version + 1, labels = (labels - @drop::text[]) || @set::jsonb,
				annotations = (annotations - @forget::text[]) || @note::jsonb, name = CASE WHEN @rename THEN nullif(@name, '') ELSE name END,
				pinned = coalesce(@pinned, pinned)
			WHERE id = @id AND (@version::bigint = 0 OR version = @version) AND state <> ALL(@ended::text[])
				AND project_id = (SELECT current_setting('coppice.project_id')) RETURNING *
		)
		SELECT`+checkpointColumns+` FROM c`+checkpointJoins,
		pgtx.Args{
			"id": id, "version": p.Version, "set": set, "drop": drop, "note": note, "forget": forget, "rename": p.Name != nil, "name": name, "pinned": p.Pinned,
			"ended": []string{string(core.CheckpointFailed), string(core.CheckpointDeleted)},
		}))
	if err != nil {
		return controller.Checkpoint{}, err
	}
	if len(rows) > 0 {
		return rows[0], nil
	}
	now, err := t.Checkpoint(ctx, id)
	switch {
	case err != nil:
		return controller.Checkpoint{}, err
	case now.Kind == controller.KindTemplate:
		return controller.Checkpoint{}, core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "checkpoint %s is a template, which belongs to the operator; annotate a checkpoint of yours", id)
	case !now.State.Forkable() && now.State != core.CheckpointCapturing:
		return controller.Checkpoint{}, core.Errorf(core.Conflict, core.CodeStateConflict, "checkpoint %s is %s and cannot be changed any more", id, now.State)
	}
	return controller.Checkpoint{}, &controller.VersionConflictError{Object: "checkpoint " + string(id), Asked: p.Version, Current: now.Version}
}
