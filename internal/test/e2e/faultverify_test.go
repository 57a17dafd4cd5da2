package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// verify is what must hold after every fault, once it is healed: both controllers answer, nothing is on its way any more within the
// time for that, the parent has gone on, every checkpoint that was acknowledged has what it had, the host has what the rows
// say and nothing else, and records and counts are exact.
func (in *installation) verify(t *testing.T, healed time.Time) {
	t.Helper()
	in.converge(t, healed)
	in.checkParent(t)
	in.checkAcknowledged(t)
	in.checkHost(t)
	in.checkBooks(t)
}

// converge wants both controllers to answer and everything to be at rest, soon after the heal began.
func (in *installation) converge(t *testing.T, healed time.Time) {
	t.Helper()
	within(t, convergence-time.Since(healed), "at rest after the fault", func() (bool, error) {
		ctx, cancel := context.WithTimeout(t.Context(), convergence)
		defer cancel()
		for _, c := range in.controllers {
			if _, err := c.client.Ready(ctx); err != nil {
				return false, nil
			}
		}
		return in.resting(ctx, in.host.client), nil
	})
	t.Logf("at rest %.1f s after the heal", time.Since(healed).Seconds())
}

// resting reports whether no workspace and no checkpoint is on its way, and every workspace's runner is heard.
func (in *installation) resting(ctx context.Context, c *coppice.Client) bool {
	list, err := coppice.Collect(c.Workspaces(ctx, coppice.WorkspaceFilter{}))
	if err != nil || slices.ContainsFunc(list, func(w coppice.Workspace) bool { return moving(w) || w.Condition == coppice.ConditionUnknown }) {
		return false
	}
	capturing, err := coppice.Collect(c.Checkpoints(ctx, coppice.CheckpointFilter{States: []coppice.CheckpointState{coppice.CheckpointCapturing}}))
	return err == nil && len(capturing) == 0
}

// checkParent wants the machine that runs all the time to have what it had, and to go on. A row that ends it sets another.
func (in *installation) checkParent(t *testing.T) {
	t.Helper()
	compare(t, "the parent", after(in.first, in.path...), look(t, in.host, in.parent))
	in.step(t, fmt.Sprint(len(in.path)))
}

// recent is how many of the acknowledged checkpoints are forked after each row, besides the first. All are looked at after the last.
const recent = 1

func (in *installation) checkAcknowledged(t *testing.T) {
	t.Helper()
	for i, a := range in.acked {
		got, err := in.host.client.Checkpoint(t.Context(), a.id)
		if err != nil || got.State != coppice.CheckpointCaptured {
			t.Errorf("checkpoint %s was acknowledged and is %s, %v", a.id, got.State, err)
		} else if i >= len(in.acked)-recent {
			in.checkCheckpoint(t, a)
		}
	}
}

func (in *installation) checkCheckpoint(t *testing.T, a acknowledged) {
	t.Helper()
	res, err := in.host.client.ForkCheckpoint(t.Context(), a.id, coppice.ForkCheckpointRequest{})
	if err != nil || len(res.Children) != 1 || res.Children[0].Workspace == nil {
		t.Errorf("a fork of acknowledged checkpoint %s: %+v, %v", a.id, res, err)
		return
	}
	child := res.Children[0].Workspace.ID
	compare(t, "a fork of an acknowledged checkpoint", after(in.first, a.path...), look(t, in.host, child))
	terminate(t, in.host, child)
}

// sql runs a query whose rows are texts, past all policies.
func (in *installation) sql(t *testing.T, query string, args ...any) []string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), in.database.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	rows, err := conn.Query(t.Context(), query, args...)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	slices.Sort(out)
	return out
}

// checkHost compares what is on the host with the rows.
func (in *installation) checkHost(t *testing.T) {
	t.Helper()
	var wrong []string
	last := time.Now()
	// What has no row goes with a heartbeat.
	within(t, convergence, "only what has a row is on the host", func() (bool, error) {
		wrong = in.surplus(t)
		if len(wrong) > 0 && time.Since(last) > convergence-time.Second {
			return false, fmt.Errorf("left behind:\n%s", strings.Join(wrong, "\n"))
		}
		return len(wrong) == 0, nil
	})
}

// idleNamespaces is the most that the runner keeps for the next sandboxes: as many as it may have, and those that it makes ahead.
const idleNamespaces = places + 2

// surplus says what the host has too much or too little of.
func (in *installation) surplus(t *testing.T) (wrong []string) {
	t.Helper()
	s := in.host
	living := in.sql(t, `SELECT id FROM sandboxes WHERE ended_at IS NULL`)
	compareCounts := func(kind string, found []string, most int) {
		if len(found) < len(living) || len(found) > len(living)+most {
			wrong = append(wrong, fmt.Sprintf("%d %s of %d living sandboxes: %q", len(found), kind, len(living), found))
		}
	}
	var vmms []string
	for pid := range s.vmms() {
		vmms = append(vmms, fmt.Sprint(pid))
	}
	compareCounts("VMMs", vmms, 0)
	found, err := s.find()
	if err != nil {
		t.Fatal(err)
	}
	var used []string
	for _, path := range found["network namespace"] {
		if _, err := s.vmmIn(path); err == nil {
			used = append(used, path)
		} else if idle, err := rulesName(path, "quarantined"); err == nil && !idle {
			wrong = append(wrong, path+" has a guest's rules and no VMM")
		}
	}
	compareCounts("network namespaces with a VMM", used, 0)
	if idle := len(found["network namespace"]) - len(used); idle > idleNamespaces {
		wrong = append(wrong, fmt.Sprintf("%d idle network namespaces", idle))
	}
	wrong = append(wrong, found["link"]...)
	for _, tree := range found["cgroup"] {
		if filepath.Ext(tree) != "" { // the pager's, or the egress process's
			continue
		}
		compareCounts("cgroups", dirsIn(tree), 0)
	}
	compareCounts("journals", dirsIn(filepath.Join(s.runDir(), "vm")), 0)
	compareCounts("disks", dirsIn(filepath.Join(in.files(), "shells")), 0)
	kept := in.sql(t, `SELECT id FROM checkpoints WHERE state IN ('captured', 'sealed')`)
	if there := dirsIn(filepath.Join(in.files(), "checkpoints")); !slices.Equal(there, kept) {
		wrong = append(wrong, fmt.Sprintf("checkpoints on the disk %q, in rows %q", there, kept))
	}
	parts, err := filepath.Glob(filepath.Join(in.files(), "*/.part-*"))
	if err != nil {
		t.Fatal(err)
	}
	return append(wrong, parts...)
}

// files is where the runner's are.
func (in *installation) files() string {
	volume := filepath.Join(in.host.data, "volume")
	if _, err := os.Stat(volume); err == nil {
		return filepath.Join(volume, "runner")
	}
	return filepath.Join(in.host.data, "runner")
}

func dirsIn(path string) (names []string) {
	entries, _ := os.ReadDir(path) // absent: none
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names
}

// checkBooks compares the audit log and the quotas' counts with the rows.
func (in *installation) checkBooks(t *testing.T) {
	t.Helper()
	for what, query := range map[string]string{
		"operation without an end": `SELECT id FROM operations WHERE state IN ('pending', 'running')`,
		"workspace whose last audit record is of another state": `
			SELECT w.id || ' is ' || w.state || ', recorded ' || coalesce(a.after, 'nothing') FROM workspaces w
			LEFT JOIN LATERAL (SELECT after FROM audit_records WHERE object_id = w.id AND after IN ('creating', 'restoring', 'quarantined', 'ready', 'checkpointing',
				'suspended', 'terminating', 'terminated', 'failed', 'lost')
				AND before NOT IN ('pending', 'running') ORDER BY id DESC LIMIT 1) a ON true
			WHERE a.after IS DISTINCT FROM w.state`,
		"workspace that was made other than once": `SELECT object_id FROM audit_records WHERE before = '' AND object_id LIKE 'ws\_%' AND after IN ('creating', 'restoring')
			GROUP BY object_id HAVING count(*) <> 1`,
		"project whose checkpoints are miscounted": `SELECT q.project_id || ' has ' || c.n || ' of ' || c.bytes || ' bytes, counted ' || q.checkpoints || ' of ' || q.checkpoint_bytes FROM quotas q
			CROSS JOIN LATERAL (SELECT count(*) AS n,
				coalesce(sum(delta_bytes + device_state_bytes + disk_bytes) FILTER (WHERE captured_at IS NOT NULL), 0) AS bytes
				FROM checkpoints WHERE project_id = q.project_id AND kind = 'user' AND state NOT IN ('failed', 'deleted')) c
			WHERE c.n <> q.checkpoints OR c.bytes <> q.checkpoint_bytes`,
		"runner whose load is miscounted": `SELECT l.runner_id || ' has ' || c.n || ' sandboxes, counted ' || l.sandboxes FROM runner_loads l
			CROSS JOIN LATERAL (SELECT count(*) AS n, coalesce(sum(vcpus), 0) AS vcpus, coalesce(sum(memory_mib), 0) AS memory_mib
				FROM sandboxes WHERE runner_id = l.runner_id AND ended_at IS NULL) c
			WHERE (c.n, c.vcpus, c.memory_mib) <> (l.sandboxes, l.vcpus, l.memory_mib)`,
		"ready workspace without a complete reseal": `SELECT w.id FROM workspaces w JOIN sandboxes s ON s.id = w.sandbox_id WHERE w.state = 'ready'
			AND NOT EXISTS (SELECT 1 FROM reseal_reports r WHERE r.sandbox_id = s.id AND r.complete AND r.generation = s.generation)`,
	} {
		for _, row := range in.sql(t, query) {
			t.Errorf("%s: %s", what, row)
		}
	}
	check, err := in.host.client.CheckAudit(t.Context(), "")
	if err != nil || !check.Intact {
		t.Errorf("the audit log: %+v, %v", check, err)
	}
	self, err := in.host.client.Self(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	project, err := in.host.client.Project(t.Context(), self.ProjectID)
	if err != nil || project.Usage == nil {
		t.Fatalf("%+v, %v", project, err)
	}
	living := in.sql(t, `SELECT id FROM workspaces WHERE project_id = $1 AND state NOT IN ('terminated', 'failed', 'lost')`, self.ProjectID)
	if project.Usage.Workspaces != int64(len(living)) || project.Usage.ForksInFlight != 0 {
		t.Errorf("the project's usage is %+v; it has the workspaces %q", *project.Usage, living)
	}
}
