package fleetrows

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// InsertDataWrites records writes that a runner's data plane has passed on. Those of sandboxes that are not the runner's, or by keys that are not of
// the sandbox's project, are left out: no runner writes into the log of others. Writes with a number are recorded once: the runner tells them again
// when it has missed an answer.
func (t *Tx) InsertDataWrites(ctx context.Context, runner core.RunnerID, log string, list []runnerapi.DataWrite) error {
	if len(list) == 0 {
		return nil
	}
	if log != "" {
		var err error
		if list, err = t.newWrites(ctx, runner, log, list); err != nil || len(list) == 0 {
			return err
		}
	}
	n := len(list)
	requests, sandboxes, keys, sources, actions, paths, times := make([]string, n), make([]string, n), make([]string, n), make([]string, n), make([]string, n), make([]string, n), make([]time.Time, n)
	for i, w := range list {
		requests[i], sandboxes[i], keys[i], sources[i], paths[i], times[i] = w.RequestID, string(w.SandboxID), string(w.KeyID), w.Source, w.Path, w.At
		actions[i] = "putFile"
		if w.Delete {
			actions[i] = "deleteFile"
		}
	}
	_, err := t.Exec(ctx, `
		INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, detail)
		SELECT s.project_id, u.request, u.key, u.source, u.action, s.workspace_id, '', '', 'accepted', '',
			jsonb_build_object('path', u.path, 'by', 'pass', 'runner', s.runner_id, 'sandbox', s.id, 'at', u.at)
		FROM unnest(@requests::text[], @sandboxes::text[], @keys::text[], @sources::text[], @actions::text[], @paths::text[], @times::timestamptz[])
			WITH ORDINALITY AS u(request, sandbox, key, source, action, path, at, n)
		JOIN sandboxes s ON s.id = u.sandbox AND s.runner_id = @runner
		JOIN api_keys k ON k.id = u.key AND k.project_id = s.project_id
		ORDER BY u.n`,
		pgtx.Args{"requests": requests, "sandboxes": sandboxes, "keys": keys, "sources": sources, "actions": actions, "paths": paths, "times": times, "runner": runner})
	return err
}

type dataLogRow struct {
	Log      string `db:"data_log"`
	Recorded int64  `db:"data_recorded"`
}

// newWrites leaves out the writes that were recorded before, and notes that the others are recorded now.
func (t *Tx) newWrites(ctx context.Context, runner core.RunnerID, log string, list []runnerapi.DataWrite) ([]runnerapi.DataWrite, error) {
	row, err := pgtx.One[dataLogRow](ctx, t, noRunner(runner), `SELECT data_log, data_recorded FROM runners WHERE id = @id FOR NO KEY UPDATE`, pgtx.Args{"id": runner})
	if err != nil {
		return nil, err
	}
	last := row.Recorded
	if row.Log != log {
		last = 0
	}
	var fresh []runnerapi.DataWrite
	for _, w := range list {
		if w.Number > last {
			last = w.Number
			fresh = append(fresh, w)
		}
	}
	if len(fresh) == 0 {
		return nil, nil
	}
	_, err = t.Exec(ctx, `UPDATE runners SET data_log = @log, data_recorded = @last WHERE id = @id`, pgtx.Args{"id": runner, "log": log, "last": last})
	return fresh, err
}
