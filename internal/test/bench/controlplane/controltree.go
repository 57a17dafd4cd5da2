package controlplane

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
)

// plant inserts generations of captured checkpoints below a root: the parent of node (g, n) is (g-1, n/2), so the nodes
// (g, 0) are a chain. All have the annotations that a search writes, and the timings of a real checkpoint. Triggers are
// off: there is no history.
const plant = `
	SET session_replication_role = replica;
	INSERT INTO checkpoints (id, project_id, kind, state, parent_project_id, parent_id, root_id, depth, workspace_id, workspace_epoch,
		image_name, image_digest, vcpus, memory_mib, disk_gib, runner_id, runner_class, class_key, base_id, annotations, timings, parent_reseal, captured_at)
	SELECT 'ckpt_' || lpad(g::text, 13, '0') || lpad(n::text, 13, '0'), s.project_id, 'user', 'captured',
		CASE WHEN g = 1 THEN '` + string(controller.SystemProject) + `' ELSE s.project_id END,
		CASE WHEN g = 1 THEN s.root_id ELSE 'ckpt_' || lpad((g - 1)::text, 13, '0') || lpad((n / 2)::text, 13, '0') END,
		s.root_id, g, s.workspace_id, 1, s.image_name, s.image_digest, s.vcpus, s.memory_mib, s.disk_gib, s.runner_id, s.runner_class, s.class_key, s.base_id,
		jsonb_build_object('score', n / 100.0, 'visits', g), s.timings, s.parent_reseal, now()
	FROM checkpoints s, generate_series(1, %d) AS g, generate_series(0, %d) AS n WHERE s.kind = 'user'`

// measureTree measures how long it takes to read a large and deep tree through REST.
func (w *world) measureTree(ctx context.Context, cfg controlConfig, r *controlReport) error {
	if _, _, err := seed(ctx, w.client); err != nil {
		return err
	}
	// A real tree grows over weeks, not in a second. So the database's background work for the new rows is done before
	// the reads, not during them.
	for _, sql := range []string{fmt.Sprintf(plant, cfg.deep, cfg.wide-1), "VACUUM ANALYZE checkpoints", "CHECKPOINT"} {
		if err := execSQL(ctx, w.dsn, sql); err != nil {
			return err
		}
	}
	deepest := fmt.Sprintf("ckpt_%013d%013d", cfg.deep, 0)
	defer http.DefaultClient.CloseIdleConnections()
	root, err := w.control.Tree.Checkpoint(ctx, w.project, core.CheckpointID(deepest))
	if err != nil {
		return err
	}
	for _, m := range []struct {
		into *report.Quantiles
		path string
		want int
	}{
		{&r.LineageMS, "/v1/checkpoints/" + deepest + "/lineage?limit=1000", min(cfg.deep+1, 1000)},
		{&r.LineagePageMS, "/v1/checkpoints/" + deepest + "/lineage", min(cfg.deep+1, 100)},
		{&r.TreePageMS, "/v1/checkpoints/" + string(root.Root) + "/tree", min(cfg.deep*cfg.wide+2, 100)},
	} {
		var times report.Samples
		for i := range cfg.reads + cfg.reads/10 {
			took, n, err := w.get(ctx, m.path)
			if err != nil {
				return err
			}
			if n != m.want {
				return fmt.Errorf("%s has %d items, want %d", m.path, n, m.want)
			}
			if i >= cfg.reads/10 { // the first ones fill caches
				times.Add(took)
			}
		}
		*m.into = times.Quantiles()
	}
	return nil
}

// get reads one page and returns how long it took, to the last byte, and how many items it has.
func (w *world) get(ctx context.Context, path string) (float64, int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.server+path, http.NoBody)
	if err != nil {
		return 0, 0, err
	}
	req.Header.Set("Authorization", "Bearer "+benchSecretToken)
	began := time.Now()
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, 0, err
	}
	body, err := io.ReadAll(res.Body)
	took := report.Since(began)
	if err = errors.Join(err, res.Body.Close()); err != nil {
		return 0, 0, err
	}
	var page struct {
		Items []json.RawMessage `json:"items"`
		Nodes []json.RawMessage `json:"nodes"`
	}
	if res.StatusCode != http.StatusOK {
		return 0, 0, fmt.Errorf("%s answered %s: %s", path, res.Status, core.Clip(string(body)))
	}
	err = json.Unmarshal(body, &page)
	return took, len(page.Items) + len(page.Nodes), err
}
