package postgres

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// workspaceColumns need the relations w (a workspace), s (its sandbox, if it lives) and r (that one's runner).
const workspaceColumns = `
	w.id, w.project_id, w.name, w.state, w.epoch, w.version, w.image_name, w.image_digest, w.vcpus, w.memory_mib, w.disk_gib,
	w.egress_policy, w.egress_allow, w.egress_version, w.egress_applied, w.grants_until IS NOT NULL AS granted, w.grants_key, w.env, w.labels, coalesce(w.idle_seconds, 0) AS idle_seconds, coalesce(w.on_idle, '') AS on_idle, w.auto_resume, coalesce(nullif(w.on_ttl, 'terminate'), '') AS on_ttl,
	coalesce(w.parent_checkpoint_id, '') AS parent_checkpoint_id, coalesce(w.checkpoint_id, '') AS checkpoint_id,
	coalesce(s.id, '') AS sandbox_id, coalesce(s.epoch, 0) AS sandbox_epoch, coalesce(s.runner_id, '') AS runner_id,
	coalesce(s.generation, '') AS generation, coalesce(s.hostname, '') AS hostname, coalesce(s.machine_id, '') AS machine_id,
	coalesce(s.mac, '') AS mac, coalesce(s.ip, '') AS ip, coalesce(s.tree_id, '') AS tree_id, coalesce(r.endpoint, '') AS endpoint, r.egress_key, coalesce(r.egress_url, '') AS egress_url, coalesce(r.lease_expires_at < now(), false) AS unknown,
	s.stalled_at, coalesce(s.stalled_code, '') AS stalled_code, coalesce(s.stalled_message, '') AS stalled_message,
	coalesce(w.failure_code, '') AS failure_code, coalesce(w.failure_message, '') AS failure_message,
	w.created_at, w.ready_at, w.expires_at, w.ended_at`

const forkable = `(c.state = 'sealed' OR c.state = 'captured' AND EXISTS (SELECT 1 FROM runners x WHERE x.id = c.runner_id AND x.fenced_at IS NULL AND x.removed_at IS NULL))`

// A plan is kept although the tables grow, and the planner guesses that an array has 10 elements and a recordset 100: in a young
// database it would read all sandboxes for the one that is meant. LIMIT 1 leaves it only the index.
const workspaceJoins = `
	LEFT JOIN LATERAL (SELECT * FROM sandboxes x WHERE x.id = w.sandbox_id LIMIT 1) s ON s.ended_at IS NULL
	LEFT JOIN LATERAL (SELECT * FROM runners y WHERE y.id = s.runner_id LIMIT 1) r ON true`

type workspaceRow struct {
	ID             core.WorkspaceID      `db:"id"`
	ProjectID      core.ProjectID        `db:"project_id"`
	Name           string                `db:"name"`
	State          core.WorkspaceState   `db:"state"`
	Epoch          int64                 `db:"epoch"`
	Version        int64                 `db:"version"`
	ImageName      string                `db:"image_name"`
	ImageDigest    core.Digest           `db:"image_digest"`
	VCPUs          int                   `db:"vcpus"`
	MemoryMiB      int                   `db:"memory_mib"`
	DiskGiB        int                   `db:"disk_gib"`
	Egress         core.EgressPolicy     `db:"egress_policy"`
	Allow          []string              `db:"egress_allow"`
	RulesVersion   int64                 `db:"egress_version"`
	RulesApplied   int64                 `db:"egress_applied"`
	Granted        bool                  `db:"granted"`
	GrantsKey      []byte                `db:"grants_key"`
	Env            pgtx.Object[string]   `db:"env"`
	Labels         pgtx.Object[string]   `db:"labels"`
	IdleSeconds    int64                 `db:"idle_seconds"`
	OnIdle         controller.IdleAction `db:"on_idle"`
	OnTTL          controller.IdleAction `db:"on_ttl"`
	AutoResume     bool                  `db:"auto_resume"`
	Parent         core.CheckpointID     `db:"parent_checkpoint_id"`
	Head           core.CheckpointID     `db:"checkpoint_id"`
	SandboxID      core.SandboxID        `db:"sandbox_id"`
	SandboxEpoch   int64                 `db:"sandbox_epoch"`
	RunnerID       core.RunnerID         `db:"runner_id"`
	Generation     string                `db:"generation"`
	Hostname       string                `db:"hostname"`
	MachineID      string                `db:"machine_id"`
	MAC            string                `db:"mac"`
	IP             string                `db:"ip"`
	Tree           string                `db:"tree_id"`
	Endpoint       string                `db:"endpoint"`
	EgressKey      []byte                `db:"egress_key"`
	EgressURL      string                `db:"egress_url"`
	Unknown        bool                  `db:"unknown"`
	StalledAt      *time.Time            `db:"stalled_at"`
	StalledCode    core.Code             `db:"stalled_code"`
	StalledMessage string                `db:"stalled_message"`
	FailureCode    core.Code             `db:"failure_code"`
	FailureMessage string                `db:"failure_message"`
	CreatedAt      time.Time             `db:"created_at"`
	ReadyAt        *time.Time            `db:"ready_at"`
	ExpiresAt      *time.Time            `db:"expires_at"`
	EndedAt        *time.Time            `db:"ended_at"`
}

func (r workspaceRow) workspace() (controller.Workspace, error) {
	w := controller.Workspace{
		ID: r.ID, ProjectID: r.ProjectID, Name: r.Name, State: r.State, Epoch: r.Epoch, Version: r.Version,
		Image:     controller.ImageRef{Name: r.ImageName, Digest: r.ImageDigest},
		Resources: core.Resources{VCPUs: r.VCPUs, MemoryMiB: r.MemoryMiB, DiskGiB: r.DiskGiB},
		Egress:    r.Egress, Rules: grants.Rules{Allow: r.Allow, Version: r.RulesVersion, Applied: r.RulesApplied, Granted: r.Granted, EncryptedFor: r.GrantsKey}, Env: r.Env, Labels: r.Labels, Parent: r.Parent, Head: r.Head,
		IdlePolicy: controller.IdlePolicy{IdleAfter: time.Duration(r.IdleSeconds) * time.Second, OnIdle: r.OnIdle, AutoResume: r.AutoResume, OnTTL: r.OnTTL},
		CreatedAt:  r.CreatedAt, ReadyAt: pgtx.TimeOf(r.ReadyAt), ExpiresAt: pgtx.TimeOf(r.ExpiresAt), EndedAt: pgtx.TimeOf(r.EndedAt),
	}
	if r.FailureCode != "" {
		w.Failure = &controller.Failure{Code: r.FailureCode, Message: r.FailureMessage}
	}
	if r.SandboxID == "" || !r.State.Live() {
		return w, nil
	}
	w.Unknown, w.Stall = r.Unknown, controller.Stall{Since: pgtx.TimeOf(r.StalledAt), Code: r.StalledCode, Message: r.StalledMessage}
	var err error
	w.Sandbox, err = sandboxRow{
		ID: r.SandboxID, ProjectID: r.ProjectID, WorkspaceID: r.ID, Epoch: r.SandboxEpoch, RunnerID: r.RunnerID, Endpoint: r.Endpoint,
		VCPUs: r.VCPUs, MemoryMiB: r.MemoryMiB, Generation: r.Generation, Hostname: r.Hostname, MachineID: r.MachineID, MAC: r.MAC, IP: r.IP,
		EgressKey: r.EgressKey, EgressURL: r.EgressURL, Tree: r.Tree,
	}.sandbox()
	return w, err
}

type sandboxRow struct {
	ID          core.SandboxID   `db:"id" json:"id"`
	ProjectID   core.ProjectID   `db:"project_id" json:"project_id"`
	WorkspaceID core.WorkspaceID `db:"workspace_id" json:"workspace_id"`
	Epoch       int64            `db:"epoch" json:"epoch"`
	RunnerID    core.RunnerID    `db:"runner_id" json:"runner_id"`
	Endpoint    string           `db:"endpoint" json:"-"`
	EgressKey   []byte           `db:"egress_key" json:"-"`
	EgressURL   string           `db:"egress_url" json:"-"`
	VCPUs       int              `db:"vcpus" json:"vcpus"`
	MemoryMiB   int              `db:"memory_mib" json:"memory_mib"`
	Generation  string           `db:"generation" json:"generation"`
	Hostname    string           `db:"hostname" json:"hostname"`
	MachineID   string           `db:"machine_id" json:"machine_id"`
	MAC         string           `db:"mac" json:"mac"`
	IP          string           `db:"ip" json:"ip"`
	Tree        string           `db:"tree_id" json:"tree_id"`
}

func (r sandboxRow) sandbox() (controller.Sandbox, error) {
	ip, err := netip.ParseAddr(r.IP)
	if err != nil {
		return controller.Sandbox{}, fmt.Errorf("sandbox %s: %w", r.ID, err)
	}
	return controller.Sandbox{
		ID: r.ID, ProjectID: r.ProjectID, WorkspaceID: r.WorkspaceID, Epoch: r.Epoch, RunnerID: r.RunnerID, Endpoint: r.Endpoint,
		Resources: core.Resources{VCPUs: r.VCPUs, MemoryMiB: r.MemoryMiB},
		Identity:  core.Identity{Generation: r.Generation, Hostname: r.Hostname, MachineID: r.MachineID, MAC: r.MAC, IP: ip},
		EgressKey: r.EgressKey, EgressURL: r.EgressURL, Tree: r.Tree,
	}, nil
}

// workspaces reads rows. For those that are lost it says from which checkpoints they can be restored.
func (t *tx) workspaces(ctx context.Context, sql string, a pgtx.Args) ([]controller.Workspace, error) {
	list, err := t.plainWorkspaces(ctx, sql, a)
	if err != nil {
		return nil, err
	}
	return list, t.setRecoverFrom(ctx, list)
}

type recoverRow struct {
	Head core.CheckpointID `db:"head"`
	ID   core.CheckpointID `db:"id"`
}

// setRecoverFrom finds, for all lost workspaces of a list with one statement, the newest checkpoint of each lineage that can be
// forked: in the store, or on a runner that was not given up. A template has nothing of the workspace.
func (t *tx) setRecoverFrom(ctx context.Context, list []controller.Workspace) error {
	heads := map[core.CheckpointID]core.CheckpointID{}
	for _, w := range list {
		if w.State == core.WorkspaceLost && w.Failure != nil && w.Head != "" {
			heads[w.Head] = ""
		}
	}
	if len(heads) == 0 {
		return nil
	}
	rows, err := pgtx.Many[recoverRow](ctx, t, `
		WITH RECURSIVE up AS (
			SELECT h.id AS head, p.id, p.parent_id, p.kind, 0 AS n, p.forkable FROM unnest(@heads::text[]) AS h (id) CROSS JOIN LATERAL (
				SELECT c.id, c.parent_id, c.kind, `+forkable+` AS forkable FROM checkpoints c WHERE c.id = h.id LIMIT 1
			) p
			UNION ALL
			SELECT up.head, p.id, p.parent_id, p.kind, up.n + 1, p.forkable FROM up CROSS JOIN LATERAL (
				SELECT c.id, c.parent_id, c.kind, `+forkable+` AS forkable FROM checkpoints c WHERE c.id = up.parent_id LIMIT 1
			) p WHERE NOT up.forkable AND up.n < 1000
		)
		SELECT up.head, up.id FROM up WHERE up.forkable AND up.kind = 'user'`, pgtx.Args{"heads": pgtx.Texts(slices.Collect(maps.Keys(heads)))})
	if err != nil {
		return err
	}
	for _, r := range rows {
		heads[r.Head] = r.ID
	}
	for i, w := range list {
		if w.State == core.WorkspaceLost && w.Failure != nil {
			list[i].Failure.RecoverFrom = heads[w.Head]
		}
	}
	return nil
}

// plainWorkspaces is workspaces without a word about recovery.
func (t *tx) plainWorkspaces(ctx context.Context, sql string, a pgtx.Args) ([]controller.Workspace, error) {
	rows, err := pgtx.Many[workspaceRow](ctx, t, sql, a)
	if err != nil {
		return nil, err
	}
	list := make([]controller.Workspace, len(rows))
	for i, r := range rows {
		if list[i], err = r.workspace(); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func (t *tx) workspace(ctx context.Context, absent error, sql string, a pgtx.Args) (controller.Workspace, error) {
	list, err := t.workspaces(ctx, sql, a)
	switch {
	case err != nil:
		return controller.Workspace{}, err
	case len(list) == 0:
		return controller.Workspace{}, absent
	}
	return list[0], nil
}

func noWorkspace(id core.WorkspaceID) error {
	return core.Errorf(core.NotFound, core.CodeWorkspaceNotFound, "there is no workspace %s", id)
}

// Workspace returns one.
func (t *tx) Workspace(ctx context.Context, id core.WorkspaceID) (controller.Workspace, error) {
	return t.workspace(ctx, noWorkspace(id), `SELECT`+workspaceColumns+` FROM workspaces w`+workspaceJoins+` WHERE w.id = @id`, pgtx.Args{"id": id})
}

// Workspaces lists, newest first.
func (t *tx) Workspaces(ctx context.Context, f controller.WorkspaceFilter) ([]controller.Workspace, error) {
	q := pgtx.NewFilter("w", f.Page, false)
	q.Equal("name", f.Name)
	q.Equal("checkpoint_id", string(f.Head))
	q.Equal("parent_checkpoint_id", string(f.Parent))
	q.Suffix(f.IDSuffix)
	q.AnyOf("state", pgtx.Texts(f.States))
	q.Labels(f.Labels)
	return t.workspaces(ctx, `SELECT`+workspaceColumns+` FROM workspaces w`+workspaceJoins+q.Where()+q.Tail(), q.Args)
}

// WorkspacesByID returns those that exist, in the order of ids.
func (t *tx) WorkspacesByID(ctx context.Context, ids []core.WorkspaceID) ([]controller.Workspace, error) {
	return t.workspaces(ctx, `
		SELECT`+workspaceColumns+` FROM unnest(@ids::text[]) WITH ORDINALITY AS asked (id, n)
		JOIN workspaces w ON w.id = asked.id`+workspaceJoins+` ORDER BY asked.n`, pgtx.Args{"ids": pgtx.Texts(ids)})
}

// HeadWorkspaces lists what lives on top of checkpoints.
func (t *tx) HeadWorkspaces(ctx context.Context, heads []core.CheckpointID) ([]controller.Workspace, error) {
	return t.workspaces(ctx, `
		SELECT`+workspaceColumns+` FROM workspaces w`+workspaceJoins+`
		WHERE w.checkpoint_id = ANY(@heads::text[]) AND w.ended_at IS NULL ORDER BY w.id`, pgtx.Args{"heads": pgtx.Texts(heads)})
}

// OrphanedTerminations lists what is half terminated and nobody works on any more.
func (t *tx) OrphanedTerminations(ctx context.Context, limit int) ([]controller.Workspace, error) {
	return t.workspaces(ctx, `
		SELECT`+workspaceColumns+` FROM workspaces w`+workspaceJoins+`
		WHERE w.state = @terminating AND NOT EXISTS (SELECT 1 FROM operations o WHERE o.workspace_id = w.id AND o.state IN ('pending', 'running'))
		ORDER BY w.id LIMIT @limit`,
		pgtx.Args{"limit": limit, "terminating": core.WorkspaceTerminating})
}

type newWorkspace struct {
	ID            core.WorkspaceID      `json:"id"`
	ProjectID     core.ProjectID        `json:"project_id"`
	Name          string                `json:"name"`
	State         core.WorkspaceState   `json:"state"`
	ImageName     string                `json:"image_name"`
	ImageDigest   core.Digest           `json:"image_digest"`
	VCPUs         int                   `json:"vcpus"`
	MemoryMiB     int                   `json:"memory_mib"`
	DiskGiB       int                   `json:"disk_gib"`
	Egress        core.EgressPolicy     `json:"egress_policy"`
	Allow         []string              `json:"egress_allow"`
	Env           map[string]string     `json:"env"`
	Labels        map[string]string     `json:"labels"`
	IdleSeconds   *int64                `json:"idle_seconds"`
	OnIdle        *string               `json:"on_idle"`
	AutoResume    bool                  `json:"auto_resume"`
	OnTTL         controller.IdleAction `json:"on_ttl"`
	Parent        *string               `json:"parent"`
	ParentProject *string               `json:"parent_project"`
	SandboxID     core.SandboxID        `json:"sandbox_id"`
}

// InsertWorkspaces inserts workspaces in their first state; their sandboxes follow in the same transaction. The parent's
// project is found by the parent's id. ttl 0 is none.
func (t *tx) InsertWorkspaces(ctx context.Context, list []controller.Workspace, ttl time.Duration) ([]controller.Workspace, error) {
	rows := make([]newWorkspace, len(list))
	for i, w := range list {
		rows[i] = newWorkspace{
			ID: w.ID, ProjectID: w.ProjectID, Name: w.Name, State: w.State, ImageName: w.Image.Name, ImageDigest: w.Image.Digest,
			VCPUs: w.Resources.VCPUs, MemoryMiB: w.Resources.MemoryMiB, DiskGiB: w.Resources.DiskGiB, Egress: w.Egress, Allow: pgtx.OrNone(w.Rules.Allow),
			Env: pgtx.OrEmpty(w.Env), Labels: pgtx.OrEmpty(w.Labels), Parent: pgtx.OrNull(w.Parent), SandboxID: w.Sandbox.ID, AutoResume: w.IdlePolicy.AutoResume,
			OnTTL: cmp.Or(w.IdlePolicy.OnTTL, controller.IdleTerminate),
		}
		if w.IdlePolicy.IdleAfter > 0 {
			idle := int64(w.IdlePolicy.IdleAfter.Seconds())
			rows[i].IdleSeconds, rows[i].OnIdle = &idle, pgtx.OrNull(w.IdlePolicy.OnIdle)
		}
	}
	return t.workspaces(ctx, `
		WITH w AS (
			INSERT INTO workspaces (id, project_id, name, state, image_name, image_digest, vcpus, memory_mib, disk_gib, egress_policy, egress_allow, env, labels,
				idle_seconds, on_idle, auto_resume, on_ttl, ttl_seconds, parent_project_id, parent_checkpoint_id, checkpoint_project_id, checkpoint_id, sandbox_id, expires_at)
			SELECT v.id, v.project_id, v.name, v.state, v.image_name, v.image_digest, v.vcpus, v.memory_mib, v.disk_gib, v.egress_policy, v.egress_allow, v.env, v.labels,
				v.idle_seconds, v.on_idle, v.auto_resume, v.on_ttl, nullif(@ttl::float8, 0)::bigint, p.project_id, v.parent, p.project_id, v.parent, v.sandbox_id, CASE WHEN @ttl::float8 > 0 THEN now() + make_interval(secs => @ttl) END
			FROM jsonb_to_recordset(@rows::jsonb) AS v (id text, project_id text, name text, state text, image_name text, image_digest text,
				vcpus int, memory_mib int, disk_gib int, egress_policy text, egress_allow text[], env jsonb, labels jsonb, idle_seconds int, on_idle text, auto_resume boolean, on_ttl text, parent text, sandbox_id text)
			LEFT JOIN LATERAL (SELECT c.project_id FROM checkpoints c WHERE c.id = v.parent LIMIT 1) p ON true
			RETURNING *
		)
		SELECT`+workspaceColumns+` FROM w`+workspaceJoins+` ORDER BY w.id`,
		pgtx.Args{"rows": rows, "ttl": ttl.Seconds()})
}

func (t *tx) staleWorkspace(ctx context.Context, id core.WorkspaceID, to core.WorkspaceState) error {
	w, err := t.Workspace(ctx, id)
	if err != nil {
		return err
	}
	return core.Errorf(core.Conflict, core.CodeStateConflict, "workspace %s is %s (epoch %d) and cannot become %s now", id, w.State, w.Epoch, to)
}

// MoveWorkspace is a compare-and-set of the state.
func (t *tx) MoveWorkspace(ctx context.Context, id core.WorkspaceID, epoch int64, to core.WorkspaceState) (controller.Workspace, error) {
	if to == core.WorkspaceReady {
		return controller.Workspace{}, core.Errorf(core.Internal, core.CodeInternal, "workspace %s: what becomes ready must look at its runner; use another method", id)
	}
	list, err := t.workspaces(ctx, `
		WITH w AS (
			UPDATE workspaces SET state = @to WHERE id = @id AND epoch = @epoch AND state = ANY(@from::text[]) RETURNING *
		)
		SELECT`+workspaceColumns+` FROM w`+workspaceJoins,
		pgtx.Args{"id": id, "epoch": epoch, "to": to, "from": pgtx.Texts(to.Sources())})
	return t.changed(ctx, id, to, list, err)
}

func (t *tx) changed(ctx context.Context, id core.WorkspaceID, to core.WorkspaceState, list []controller.Workspace, err error) (controller.Workspace, error) {
	switch {
	case err != nil:
		return controller.Workspace{}, err
	case len(list) == 0:
		return controller.Workspace{}, t.staleWorkspace(ctx, id, to)
	}
	return list[0], nil
}

// givenUp says whether the runner of a sandbox was given up. No workspace may become ready there.
func givenUp(sandbox string) string {
	return `EXISTS (SELECT 1 FROM sandboxes its CROSS JOIN LATERAL (SELECT x.fenced_at FROM runners x WHERE x.id = its.runner_id LIMIT 1) host WHERE its.id = ` + sandbox + ` AND host.fenced_at IS NOT NULL OFFSET 0)`
}

// ReturnWorkspace gives a workspace back to the sandbox that it has.
func (t *tx) ReturnWorkspace(ctx context.Context, id core.WorkspaceID, epoch int64) (controller.Workspace, error) {
	return t.returned(ctx, id, epoch, core.WorkspaceRestoring, nil)
}

// returned makes a workspace ready in the sandbox that it had all the time, or lost when the runner of that one was given up
// meanwhile.
func (t *tx) returned(ctx context.Context, id core.WorkspaceID, epoch int64, from core.WorkspaceState, head *controller.Checkpoint) (controller.Workspace, error) {
	a := pgtx.Args{
		"id": id, "epoch": epoch, "ready": core.WorkspaceReady, "lost": core.WorkspaceLost, "from": from, "head": nil, "project": nil,
		"code": core.CodeRunnerLost, "message": controller.SilentRunner,
	}
	if head != nil {
		a["head"], a["project"] = head.ID, head.ProjectID
	}
	list, err := t.workspaces(ctx, `
		WITH at AS (
			SELECT was.id, `+givenUp("was.sandbox_id")+` AS gone FROM workspaces was WHERE was.id = @id
		), w AS (
			UPDATE workspaces SET state = CASE WHEN at.gone THEN @lost ELSE @ready END, ended_at = CASE WHEN at.gone THEN now() END,
				failure_code = CASE WHEN at.gone THEN @code END, failure_message = CASE WHEN at.gone THEN @message END,
				checkpoint_project_id = coalesce(@project, workspaces.checkpoint_project_id), checkpoint_id = coalesce(@head, workspaces.checkpoint_id)
			FROM at WHERE workspaces.id = at.id AND workspaces.id = @id AND workspaces.epoch = @epoch AND workspaces.state = @from RETURNING workspaces.*
		), gone AS (
			UPDATE sandboxes SET ended_at = now() WHERE workspace_id IN (SELECT id FROM w WHERE w.state = @lost) AND ended_at IS NULL
		)
		SELECT`+workspaceColumns+` FROM w`+workspaceJoins, a)
	return t.changed(ctx, id, core.WorkspaceReady, list, err)
}

// ForkWorkspaceFrom gives a workspace that is being created its template.
func (t *tx) ForkWorkspaceFrom(ctx context.Context, id core.WorkspaceID, from controller.Checkpoint) (controller.Workspace, error) {
	list, err := t.workspaces(ctx, `
		WITH w AS (
			UPDATE workspaces SET state = @to, parent_project_id = @project, parent_checkpoint_id = @parent, checkpoint_project_id = @project, checkpoint_id = @parent
			WHERE id = @id AND state = ANY(@from::text[]) AND sandbox_id IS NOT NULL RETURNING *
		)
		SELECT`+workspaceColumns+` FROM w`+workspaceJoins,
		pgtx.Args{"id": id, "to": core.WorkspaceRestoring, "project": from.ProjectID, "parent": from.ID, "from": []string{string(core.WorkspaceCreating), string(core.WorkspaceRestoring)}})
	return t.changed(ctx, id, core.WorkspaceRestoring, list, err)
}

// ReadyWorkspaces moves what still waits for its sandbox to ready and returns it in the order of the list. What is on a runner
// that was given up meanwhile does not become ready.
func (t *tx) ReadyWorkspaces(ctx context.Context, ready []controller.ReadyWorkspace) ([]controller.Workspace, error) {
	ids, sandboxes, epochs := make([]string, len(ready)), make([]string, len(ready)), make([]int64, len(ready))
	given := newGiven(len(ready))
	for i, r := range ready {
		ids[i], sandboxes[i], epochs[i] = string(r.ID), string(r.Sandbox), r.Epoch
		given.set(i, r.Given)
	}
	a := pgtx.Args{
		"ids": ids, "sandboxes": sandboxes, "epochs": epochs, "rules": given.versions, "keys": given.keys, "untils": given.untils, "to": core.WorkspaceReady,
		"from": []string{string(core.WorkspaceRestoring), string(core.WorkspaceQuarantined)},
	}
	single := ""
	if len(ready) == 1 { // says no more than the join does, but to the planner: see workspaceJoins
		single, a["id"] = " AND workspaces.id = @id", ids[0]
	}
	return t.workspaces(ctx, `
		WITH asked AS (
			SELECT * FROM unnest(@ids::text[], @sandboxes::text[], @epochs::bigint[], @rules::bigint[], @keys::bytea[], @untils::timestamptz[]) WITH ORDINALITY AS a (id, sandbox_id, epoch, rules, sealed, until, n)
		), w AS (
			UPDATE workspaces SET state = @to, ready_at = now(), egress_applied = asked.rules,
				grants_key = CASE WHEN grants_key IS NOT NULL THEN asked.sealed END, grants_until = CASE WHEN grants_until IS NOT NULL THEN asked.until END FROM asked
			WHERE workspaces.id = asked.id AND workspaces.epoch = asked.epoch AND workspaces.sandbox_id = asked.sandbox_id
				AND workspaces.state = ANY(@from::text[]) AND NOT `+givenUp("workspaces.sandbox_id")+single+`
			RETURNING workspaces.*, asked.n
		)
		SELECT`+workspaceColumns+` FROM w`+workspaceJoins+` ORDER BY w.n`, a)
}

// SwitchWorkspace puts a workspace into the sandbox that a restore prepared.
func (t *tx) SwitchWorkspace(ctx context.Context, id core.WorkspaceID, epoch int64, sandbox core.SandboxID, head controller.Checkpoint, given grants.Given) (controller.Workspace, error) {
	one := newGiven(1)
	one.set(0, given)
	list, err := t.workspaces(ctx, `
		WITH w AS (
			UPDATE workspaces SET state = @to, epoch = epoch + 1, sandbox_id = @sandbox, ready_at = now(), disk_gib = @disk, egress_applied = @rules,
				grants_key = CASE WHEN grants_key IS NOT NULL THEN @key::bytea END, grants_until = CASE WHEN grants_until IS NOT NULL THEN @until::timestamptz END,
				checkpoint_project_id = @head_project, checkpoint_id = @head
			WHERE id = @id AND epoch = @epoch AND state = ANY(@from::text[]) AND NOT `+givenUp("@sandbox")+` RETURNING *
		)
		SELECT`+workspaceColumns+` FROM w`+workspaceJoins,
		pgtx.Args{
			"id": id, "epoch": epoch, "sandbox": sandbox, "disk": head.Resources.DiskGiB, "rules": given.Version, "key": one.keys[0], "until": one.untils[0], "head_project": head.ProjectID, "head": head.ID,
			"to": core.WorkspaceReady, "from": []string{string(core.WorkspaceRestoring), string(core.WorkspaceQuarantined)},
		})
	if err == nil && len(list) == 0 {
		n, err := t.Exec(ctx, `SELECT WHERE `+givenUp("@sandbox"), pgtx.Args{"sandbox": sandbox})
		if err == nil && n > 0 {
			err = core.Errorf(core.Unavailable, core.CodeRunnerLost, "the runner of sandbox %s was given up while the sandbox was being made", sandbox)
		}
		if err != nil {
			return controller.Workspace{}, err
		}
	}
	// After the workspace, in the order of transactions that end one: so both locks have one order.
	t.Soon(`UPDATE sandboxes SET ended_at = now() WHERE workspace_id = @id AND id <> @sandbox AND ended_at IS NULL`, pgtx.Args{"id": id, "sandbox": sandbox})
	return t.changed(ctx, id, core.WorkspaceReady, list, err)
}

// CapturedWorkspace ends a capture of a workspace that still is in it.
func (t *tx) CapturedWorkspace(ctx context.Context, id core.WorkspaceID, epoch int64, head *controller.Checkpoint) (controller.Workspace, error) {
	return t.returned(ctx, id, epoch, core.WorkspaceCheckpointing, head)
}

// SuspendWorkspace stops a workspace that still is in its capture.
func (t *tx) SuspendWorkspace(ctx context.Context, id core.WorkspaceID, epoch int64, head controller.Checkpoint) (controller.Workspace, error) {
	list, err := t.workspaces(ctx, `
		WITH w AS (
			UPDATE workspaces SET state = @to, sandbox_id = NULL, checkpoint_project_id = @head_project, checkpoint_id = @head
			WHERE id = @id AND epoch = @epoch AND state = @from RETURNING *
		), gone AS (
			UPDATE sandboxes SET ended_at = now() WHERE workspace_id IN (SELECT id FROM w) AND ended_at IS NULL
		)
		SELECT`+workspaceColumns+` FROM w`+workspaceJoins,
		pgtx.Args{
			"id": id, "epoch": epoch, "head_project": head.ProjectID, "head": head.ID, "to": core.WorkspaceSuspended,
			"from": core.WorkspaceCheckpointing,
		})
	return t.changed(ctx, id, core.WorkspaceSuspended, list, err)
}

// IdleWorkspaces lists what nobody used for too long. Starting a session is use too, and is recorded in the session's own row.
func (t *tx) IdleWorkspaces(ctx context.Context, margin time.Duration, ids []core.WorkspaceID, limit int) ([]controller.Workspace, error) {
	return t.workspaces(ctx, `
		SELECT`+workspaceColumns+` FROM workspaces w`+workspaceJoins+` LEFT JOIN workspace_uses u ON u.workspace_id = w.id
		WHERE w.idle_seconds IS NOT NULL AND w.state = 'ready' AND (cardinality(@ids::text[]) = 0 OR w.id = ANY(@ids))
			AND greatest(w.ready_at, u.used_at, (SELECT max(x.created_at) FROM sessions x WHERE x.sandbox_id = w.sandbox_id))
				< now() - make_interval(secs => w.idle_seconds + @margin::float8)
		ORDER BY w.id LIMIT @limit`, pgtx.Args{"margin": margin.Seconds(), "ids": pgtx.Texts(ids), "limit": limit})
}

// UseWorkspaces is one statement for all.
func (t *tx) UseWorkspaces(ctx context.Context, ids []core.WorkspaceID) error {
	_, err := t.Exec(ctx, `
		INSERT INTO workspace_uses (workspace_id, project_id, used_at)
		SELECT w.id, w.project_id, now() FROM workspaces w WHERE w.id = ANY(@ids::text[]) ORDER BY w.id
		ON CONFLICT ON CONSTRAINT workspace_uses_pkey DO UPDATE SET used_at = greatest(workspace_uses.used_at, excluded.used_at)`, pgtx.Args{"ids": pgtx.Texts(ids)})
	return err
}

type endedWorkspace struct {
	ID      core.WorkspaceID    `json:"id"`
	To      core.WorkspaceState `json:"to_state"`
	From    []string            `json:"from_states"`
	Code    *string             `json:"code"`
	Message *string             `json:"message"`
	Sandbox *string             `json:"sandbox_id"`
}

// EndWorkspaces ends the workspaces that may end, and all their sandboxes. It does not look for
// checkpoints to recover from, because that would read the lineage of each workspace.
func (t *tx) EndWorkspaces(ctx context.Context, ended []controller.EndedWorkspace) ([]controller.Workspace, error) {
	rows, ids := make([]endedWorkspace, len(ended)), make([]string, len(ended)) // the ids say no more than the rows do, but to the planner: see workspaceJoins
	for i, e := range ended {
		ids[i] = string(e.ID)
		rows[i] = endedWorkspace{ID: e.ID, To: e.To, From: pgtx.Texts(e.To.Sources()), Sandbox: pgtx.OrNull(e.Sandbox)}
		if e.Failure != nil {
			rows[i].Code, rows[i].Message = pgtx.OrNull(e.Failure.Code), pgtx.OrNull(e.Failure.Message)
		}
	}
	return t.plainWorkspaces(ctx, `
		WITH w AS (
			UPDATE workspaces SET state = v.to_state, ended_at = coalesce(ended_at, now()),
				failure_code = coalesce(v.code, failure_code), failure_message = coalesce(v.message, failure_message)
			FROM jsonb_to_recordset(@rows::jsonb) AS v (id text, to_state text, from_states text[], code text, message text, sandbox_id text)
			WHERE workspaces.id = ANY(@ids::text[]) AND workspaces.id = v.id AND workspaces.state = ANY(v.from_states) AND (v.sandbox_id IS NULL OR workspaces.sandbox_id = v.sandbox_id)
			RETURNING workspaces.*
		), gone AS (
			UPDATE sandboxes SET ended_at = now() WHERE workspace_id IN (SELECT id FROM w) AND ended_at IS NULL
		), closed AS (
			DELETE FROM ports WHERE workspace_id IN (SELECT id FROM w)
		)
		SELECT`+workspaceColumns+` FROM w`+workspaceJoins+` ORDER BY w.id`, pgtx.Args{"rows": rows, "ids": ids})
}

// PatchWorkspace changes name, labels, expiry and idle policy.
func (t *tx) PatchWorkspace(ctx context.Context, id core.WorkspaceID, p controller.WorkspacePatch) (controller.Workspace, error) {
	set, drop := pgtx.Split(p.Labels)
	var ttl *float64
	if p.TTL != nil {
		s := p.TTL.Seconds()
		ttl = &s
	}
	var idle *int64
	if p.IdleAfter != nil {
		s := int64(p.IdleAfter.Seconds())
		idle = &s
	}
	list, err := t.workspaces(ctx, `
		WITH w AS (
			UPDATE workspaces SET version = version + 1, name = coalesce(@name, name), labels = (labels - @drop::text[]) || @set::jsonb,
				expires_at = CASE WHEN @ttl = 0 THEN NULL WHEN @ttl::float8 IS NOT NULL THEN now() + make_interval(secs => @ttl)
					WHEN @on_ttl::text = 'terminate' AND on_ttl = 'suspend' AND expires_at <= now() THEN now() + coalesce(make_interval(secs => ttl_seconds), expires_at - created_at)
					ELSE expires_at END,
				idle_seconds = CASE WHEN @idle::int IS NULL THEN idle_seconds ELSE nullif(@idle, 0) END,
				on_idle = CASE WHEN coalesce(@idle, idle_seconds, 0) > 0 THEN coalesce(@on_idle::text, on_idle, @default) END,
				auto_resume = coalesce(@auto_resume, auto_resume), on_ttl = coalesce(@on_ttl, on_ttl),
				ttl_seconds = CASE WHEN @ttl::float8 IS NULL THEN ttl_seconds ELSE nullif(@ttl, 0)::bigint END,
				suspend_next_at = CASE WHEN @ttl::float8 IS NULL AND @on_ttl::text IS NULL THEN suspend_next_at END,
				suspend_tries = CASE WHEN @ttl::float8 IS NULL AND @on_ttl::text IS NULL THEN suspend_tries ELSE 0 END
			WHERE id = @id AND (@version::bigint = 0 OR version = @version) RETURNING *
		)
		SELECT`+workspaceColumns+` FROM w`+workspaceJoins,
		pgtx.Args{"id": id, "version": p.Version, "name": pgtx.OrNull(p.Name), "set": set, "drop": drop, "ttl": ttl, "idle": idle, "on_idle": pgtx.OrNull(p.OnIdle), "default": controller.IdleSuspend, "auto_resume": p.AutoResume, "on_ttl": pgtx.OrNull(p.OnTTL)})
	switch {
	case err != nil:
		return controller.Workspace{}, err
	case len(list) == 0:
		now, err := t.Workspace(ctx, id)
		if err == nil {
			err = &controller.VersionConflictError{Object: "workspace " + string(id), Asked: p.Version, Current: now.Version}
		}
		return controller.Workspace{}, err
	}
	return list[0], nil
}

// Find reads what an id names.
func (t *tx) Find(ctx context.Context, id string) (err error) {
	if strings.HasPrefix(id, "ckpt_") {
		_, err = t.Checkpoint(ctx, core.CheckpointID(id))
		return err
	}
	_, err = t.Workspace(ctx, core.WorkspaceID(id))
	return err
}
