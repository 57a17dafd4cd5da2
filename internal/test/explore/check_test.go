package explore

import (
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/core"
)

// underWay are counts of what is not at rest.
var underWay = []string{
	`SELECT count(*) FROM operations WHERE state IN ('pending', 'running')`,
	`SELECT count(*) FROM workspaces WHERE state IN ('creating', 'restoring', 'quarantined', 'checkpointing', 'terminating')`,
	`SELECT count(*) FROM checkpoints WHERE state IN ('capturing', 'captured')`,
	`SELECT count(*) FROM store_holds`,
	`SELECT count(*) FROM workspaces WHERE state = 'ready' AND egress_applied < egress_version`,
	`SELECT count(*) FROM runners WHERE fenced_at IS NOT NULL`,
}

// atRest reports whether nothing is under way.
func (w *world) atRest() bool { return w.number(anyUnderWay) == 0 }

// anyUnderWay is their sum: the explorer asks for it all the time.
var anyUnderWay = "SELECT (" + strings.Join(underWay, ") + (") + ")"

// settle waits until nothing is under way, and the runner has said what it holds.
func (w *world) settle() {
	if !w.eventually("everything comes to rest", func() bool {
		w.runner.Hurry()
		return w.atRest()
	}) {
		for _, query := range underWay {
			w.log.note("%d: %s", w.number(query), query)
		}
		return
	}
	w.beat()
	w.beat()
	w.within(10*time.Second, func() bool { // what was told to drop something does so; check says what was not done
		w.runner.Hurry()
		return slices.Equal(w.living(), w.held()) && slices.Equal(w.kept(), w.copies()) && w.driver.Machines() == len(w.living())
	})
}

// strings asks the database for a list.
func (w *world) strings(query string, args ...any) []string {
	rows, err := w.db.Query(w.t.Context(), query, args...)
	if err != nil {
		w.log.fail("%s: %v", query, err)
		return nil
	}
	defer rows.Close()
	var list []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			w.log.fail("%s: %v", query, err)
		}
		list = append(list, s)
	}
	return list
}

// living is the sandboxes that the rows say run, and held those of the runner.
func (w *world) living() []string {
	return w.strings(`SELECT id FROM sandboxes WHERE ended_at IS NULL ORDER BY id`)
}

func (w *world) held() []string {
	var list []string
	for _, s := range w.runner.Sandboxes() {
		if s.State != runnerapi.SandboxDead {
			list = append(list, string(s.ID))
		}
	}
	slices.Sort(list)
	return list
}

// kept is the checkpoints that the rows say the runner has, and copies those of the runner.
func (w *world) kept() []string {
	return w.strings(`SELECT checkpoint_id FROM checkpoint_copies ORDER BY checkpoint_id`)
}

func (w *world) copies() []string {
	var list []string
	for _, c := range w.runner.Checkpoints() {
		list = append(list, string(c.ID))
	}
	slices.Sort(list)
	return list
}

// rows are the invariants that the database alone can break. Each query counts what breaks one.
var rows = map[string]string{
	"operations that did not end once": `SELECT count(*) FROM operations o WHERE
		(SELECT count(*) FROM events e WHERE e.operation_id = o.id AND e.type IN ('operation.succeeded', 'operation.failed')) <> 1 AND o.kind <> 'create_template'`,
	"events of an end that is not that of the operation": `SELECT count(*) FROM events e JOIN operations o ON o.id = e.operation_id
		WHERE e.type IN ('operation.succeeded', 'operation.failed') AND e.type <> 'operation.' || o.state`,
	"living sandboxes of ended workspaces":       `SELECT count(*) FROM sandboxes s JOIN workspaces w ON w.id = s.workspace_id WHERE s.ended_at IS NULL AND (w.ended_at IS NOT NULL OR w.sandbox_id <> s.id)`,
	"living sandboxes of suspended workspaces":   `SELECT count(*) FROM sandboxes s JOIN workspaces w ON w.id = s.workspace_id WHERE s.ended_at IS NULL AND w.state = 'suspended'`,
	"workspaces with two living sandboxes":       `SELECT count(*) FROM (SELECT workspace_id FROM sandboxes WHERE ended_at IS NULL GROUP BY 1 HAVING count(*) > 1) x`,
	"ready workspaces without a living sandbox":  `SELECT count(*) FROM workspaces w WHERE w.state = 'ready' AND NOT EXISTS (SELECT 1 FROM sandboxes s WHERE s.id = w.sandbox_id AND s.epoch = w.epoch AND s.ended_at IS NULL)`,
	"ready workspaces without a complete reseal": `SELECT count(*) FROM workspaces w JOIN sandboxes s ON s.id = w.sandbox_id WHERE w.state = 'ready' AND NOT EXISTS (SELECT 1 FROM reseal_reports r WHERE r.sandbox_id = s.id AND r.complete AND r.generation = s.generation)`,
	"ready workspaces without an attestation":    `SELECT count(*) FROM workspaces w WHERE w.state = 'ready' AND NOT EXISTS (SELECT 1 FROM attestations a WHERE a.workspace_id = w.id AND a.epoch = w.epoch AND a.sandbox_id = w.sandbox_id)`,
	"attestations twice for one epoch":           `SELECT count(*) FROM (SELECT workspace_id, epoch FROM attestations GROUP BY 1, 2 HAVING count(DISTINCT sandbox_id) > 1) x`,
	"generations, MACs or machine ids that two sandboxes had": `SELECT (SELECT count(*) - count(DISTINCT generation) FROM sandboxes) + (SELECT count(*) - count(DISTINCT machine_id) FROM sandboxes)
		+ (SELECT count(*) - count(DISTINCT mac) FROM sandboxes WHERE ended_at IS NULL)`,
	"addresses that two living sandboxes have": `SELECT count(*) - count(DISTINCT ip) FROM sandboxes WHERE ended_at IS NULL`,
	"suspended workspaces without a checkpoint": `SELECT count(*) FROM workspaces w WHERE w.state = 'suspended' AND NOT EXISTS
		(SELECT 1 FROM checkpoints c WHERE c.id = w.checkpoint_id AND c.state IN ('captured', 'sealed'))`,
	"runners whose load is not that of their sandboxes": `SELECT count(*) FROM runner_loads l WHERE (l.sandboxes, l.vcpus, l.memory_mib) IS DISTINCT FROM
		(SELECT (count(*)::int, coalesce(sum(vcpus), 0)::int, coalesce(sum(memory_mib), 0)::bigint) FROM sandboxes s WHERE s.runner_id = l.runner_id AND s.ended_at IS NULL)`,
	"projects with fewer places than workspaces": `SELECT count(*) FROM quotas q WHERE q.workspaces < (SELECT count(*) FROM workspaces w WHERE w.project_id = q.project_id AND w.ended_at IS NULL)`,
	"projects whose checkpoints are counted wrong": `SELECT count(*) FROM quotas q WHERE q.project_id <> 'prj_00000000000000000000000000' AND q.checkpoints <>
		(SELECT count(*) FROM checkpoints c WHERE c.project_id = q.project_id AND c.state NOT IN ('deleted', 'failed'))`,
	"sealed checkpoints without their objects": `SELECT count(*) FROM checkpoints c WHERE c.state = 'sealed' AND NOT EXISTS (SELECT 1 FROM checkpoint_objects o WHERE o.checkpoint_id = c.id)`,
	"objects of deleted checkpoints":           `SELECT count(*) FROM checkpoint_objects o JOIN checkpoints c ON c.id = o.checkpoint_id WHERE c.state IN ('deleted', 'failed')`,
	"seals that are left":                      `SELECT count(*) FROM seals s JOIN checkpoints c ON c.id = s.checkpoint_id WHERE c.state <> 'captured'`,
	"holds that are left":                      `SELECT count(*) FROM store_holds`,
	"copies of deleted checkpoints":            `SELECT count(*) FROM checkpoint_copies y JOIN checkpoints c ON c.id = y.checkpoint_id WHERE c.state IN ('deleted', 'failed')`,
}

// check looks for what was broken.
func (w *world) check(s schedule, set scene, replies []reply) {
	if w.log.broken() {
		return
	}
	w.whole()
	w.identities()
	w.rules(set, replies)
	for _, r := range replies {
		w.answered(s, r)
	}
	w.bystanders(s, set)
}

// whole looks for what must hold of everything at any time when nothing is under way.
func (w *world) whole() {
	for what, query := range rows {
		if n := w.number(query); n != 0 {
			w.log.fail("%d %s", n, what)
		}
	}
	if living, held := w.living(), w.held(); !slices.Equal(living, held) {
		w.log.fail("the rows say that %v run, and the runner runs %v", living, held)
	}
	if n := len(w.living()); w.driver.Machines() != n {
		w.log.fail("there are %d machines for %d sandboxes", w.driver.Machines(), n)
	}
	if kept, copies := w.kept(), w.copies(); !slices.Equal(kept, copies) {
		w.log.fail("the rows say that the runner has %v, and it has %v", kept, copies)
	}
	if n := len(w.living()); int(w.spaces.Load()) != n {
		w.log.fail("there are %d namespaces for %d sandboxes", w.spaces.Load(), n)
	}
}

// identities compares what runs with the rows.
func (w *world) identities() {
	for _, s := range w.runner.Sandboxes() {
		if s.State == runnerapi.SandboxDead {
			continue
		}
		if n := w.number(`SELECT count(*) FROM sandboxes WHERE id = $1 AND workspace_id = $2 AND epoch = $3 AND generation = $4 AND machine_id = $5 AND ip = $6 AND mac = $7`,
			s.ID, s.WorkspaceID, s.Epoch, s.Identity.Generation, s.Identity.MachineID, s.Identity.IP, s.Identity.MAC); n != 1 {
			w.log.fail("sandbox %s runs as %+v, which is not what its row says", s.ID, s.Identity)
		}
	}
}

// rules compares what the egress process serves with the rows.
func (w *world) rules(set scene, replies []reply) {
	if w.egress == nil {
		return
	}
	list, err := w.egress.List(w.t.Context())
	if err != nil {
		w.log.fail("the egress process: %v", err)
		return
	}
	var served []string
	for _, s := range list {
		served = append(served, string(s.ID))
		if n := w.number(`SELECT egress_version FROM workspaces WHERE sandbox_id = $1`, s.ID); int64(n) != s.Version || s.Lacks {
			w.log.fail("the egress process has version %d of the rules of sandbox %s (it lacks grants: %v), and the row has %d", s.Version, s.ID, s.Lacks, n)
		}
	}
	slices.Sort(served)
	if living := w.living(); !slices.Equal(served, living) {
		w.log.fail("the egress process serves %v, and the rows say that %v run", served, living)
	}
	held, _, err := w.second.Grants().List(w.t.Context(), w.project, set.workspace)
	if err != nil {
		w.log.fail("grants: %v", err)
		return
	}
	for _, r := range replies {
		want, name := map[string]bool{"grant": true}[r.kind], map[string]string{"grant": "new", "revoke": "old"}[r.kind]
		if is := slices.ContainsFunc(held, func(g grants.Held) bool { return g.Name == name }); name != "" && r.err == nil && is != want {
			w.log.fail("%s was acknowledged, and the workspace has %d grants without saying so", r.kind, len(held))
		}
	}
}

// answered says whether what was told to somebody is so.
func (w *world) answered(s schedule, r reply) {
	if r.operation != "" {
		want := map[bool]string{true: "succeeded", false: "failed"}[r.err == nil]
		if n := w.number(`SELECT count(*) FROM operations WHERE id = $1`, r.operation); n != 1 {
			w.log.fail("%s was answered with operation %s, which is not there", r.kind, r.operation)
		} else if r.done && w.number(`SELECT count(*) FROM operations WHERE id = $1 AND state = $2`, r.operation, want) != 1 {
			w.log.fail("%s was answered that operation %s has %s, and that is not so", r.kind, r.operation, want)
		}
	}
	if !r.done || r.err != nil {
		return
	}
	if c := r.result.Checkpoint; c != nil {
		w.lasts(s, c.ID)
	}
	if ws := r.result.Workspace; ws != nil {
		w.lives(s, ws.ID)
	}
	for _, child := range r.result.Children {
		if child.Workspace != nil {
			w.lives(s, child.Workspace.ID)
		}
	}
}

func (s schedule) has(kinds ...string) bool {
	other, then, _ := strings.Cut(s.other, ", then ")
	return slices.ContainsFunc(kinds, func(k string) bool { return k == s.kind || k == other || k == then })
}

// lasts says whether a checkpoint is as it was acknowledged.
func (w *world) lasts(s schedule, id core.CheckpointID) {
	if s.has("delete", "prune") {
		return // which may have been of this one
	}
	if n := w.number(`SELECT count(*) FROM checkpoints WHERE id = $1 AND state IN ('captured', 'sealed')`, id); n != 1 {
		w.log.fail("checkpoint %s was acknowledged, and is lost", id)
	}
}

// lives says whether a workspace is there that was acknowledged.
func (w *world) lives(s schedule, id core.WorkspaceID) {
	if n := w.number(`SELECT count(*) FROM workspaces WHERE id = $1 AND state IN ('ready', 'suspended')`, id); n != 1 && !s.has("terminate", fencing) {
		w.log.fail("workspace %s was acknowledged, and is lost", id)
	}
}

// bystanders says whether what nobody wanted to end is there.
func (w *world) bystanders(s schedule, set scene) {
	w.lives(s, set.workspace)
	w.lasts(s, set.older)
	w.lasts(s, set.checkpoint)
	w.noneLost(s)
}

// noneLost says whether the schedule lost a workspace though nobody gave up the runner.
func (w *world) noneLost(s schedule) {
	if n := w.number(`SELECT count(*) FROM workspaces WHERE state = 'lost' AND project_id = $1`, w.project); n != 0 && !s.has(fencing) {
		w.log.fail("%d workspaces are lost though nobody gave up their runner", n)
	}
}
