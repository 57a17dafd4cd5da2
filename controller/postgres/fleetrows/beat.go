package fleetrows

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/api/runnerapi/beats"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// beatRow is what a heartbeat finds. Number, Known and HeartbeatAt are what they were before it.
type beatRow struct {
	Number      int64           `db:"number"`
	Known       bool            `db:"known"`
	HeartbeatAt time.Time       `db:"heartbeat_at"`
	Endpoint    string          `db:"endpoint"`
	ImagesSum   string          `db:"images_sum"`
	Removed     []core.RunnerID `db:"removed"`
	Holds       bool            `db:"holds"`
	Draining    bool            `db:"draining"`
}

// leaseRow is what decides whether a heartbeat is applied.
type leaseRow struct {
	Epoch     int64     `db:"lease_epoch"`
	StartedAt time.Time `db:"started_at"`
	Fenced    bool      `db:"fenced"`
	Number    int64     `db:"number"`
}

// lastNumber is the number of the last heartbeat with the present lease.
const lastNumber = "CASE WHEN beat_epoch = lease_epoch THEN beat ELSE 0 END AS number"

// maxRemoved bounds the removed runners in an answer. No more than fleet.MaxTokens can have joined while their certificates are good. It is part of the
// statement: if it were an argument, PostgreSQL would make a new plan for each heartbeat.
const maxRemoved = "10000"

// oldBeatAge is how old a heartbeat without a number can be when it arrives: its runner sends one list to one controller after the
// other, and gives each ten seconds.
const oldBeatAge = time.Minute

// HeartbeatRunner changes the runner's row first: heartbeats of one runner take turns. With a thousand runners, most of the database's work for
// heartbeats is not the execution of their statements but everything around it, so this is one statement, and its plan is made once.
func (t *Tx) HeartbeatRunner(ctx context.Context, id core.RunnerID, h runnerapi.Heartbeat, terms controller.BeatTerms) (controller.Beaten, error) {
	started := h.Info.StartedAt.Truncate(time.Microsecond)
	rows, err := pgtx.Many[beatRow](ctx, t, `
		UPDATE runners r SET heartbeat_at = now(), lease_expires_at = now() + make_interval(secs => @ttl), capacity = @capacity, allocated = @allocated,
			disk_free_mb = @disk, kvm = @kvm, egress_key = @egress_key, egress_url = @egress_url,
			beat = @number::bigint, beat_epoch = r.lease_epoch, beat_at = CASE WHEN @number::bigint > 0 THEN now() END
		FROM (
			SELECT id, heartbeat_at, `+lastNumber+`, coalesce(beat_epoch = lease_epoch AND beat_at = heartbeat_at, false) AS known
			FROM runners WHERE id = @id FOR NO KEY UPDATE
		) was
		WHERE r.id = was.id AND r.lease_epoch = @epoch AND r.started_at = @started AND r.fenced_at IS NULL
			AND was.number >= @answered AND (was.number = 0 OR was.number < @number)
		RETURNING was.number, was.known, was.heartbeat_at, r.endpoint, r.draining,
			coalesce((SELECT l.images_sum FROM runner_loads l WHERE l.runner_id = r.id), '') AS images_sum,
			ARRAY(SELECT i.runner_id FROM runner_identities i WHERE i.revoked_at > now() - make_interval(secs => @within) ORDER BY i.revoked_at DESC LIMIT `+maxRemoved+`) AS removed,
			EXISTS (SELECT FROM store_holds s WHERE s.runner_id = r.id) AS holds`,
		pgtx.Args{
			"id": id, "epoch": h.LeaseEpoch, "started": started, "number": h.Number, "answered": h.Answered, "within": terms.RemovedWithin.Seconds(),
			"ttl": terms.Lease.Seconds(), "capacity": h.Info.Capacity, "allocated": h.Info.Allocated,
			"disk": h.Info.DiskFreeMB, "kvm": h.Info.KVM, "egress_key": pgtx.OrNone(h.Info.EgressKey), "egress_url": h.Info.EgressURL,
		})
	if err != nil {
		return controller.Beaten{}, err
	}
	if len(rows) == 0 {
		lease, err := pgtx.One[leaseRow](ctx, t, noRunner(id), `
			SELECT lease_epoch, started_at, fenced_at IS NOT NULL AS fenced, `+lastNumber+` FROM runners WHERE id = @id FOR NO KEY UPDATE`, pgtx.Args{"id": id})
		if err == nil {
			err = refused(id, lease, h)
		}
		return controller.Beaten{}, err
	}
	row := rows[0]
	out := controller.Beaten{
		ImagesSum: row.ImagesSum, Endpoint: row.Endpoint, Next: row.Known && row.Number == h.Answered && h.Number > 0,
		Removed: row.Removed, Holds: row.Holds, Draining: row.Draining,
	}
	switch {
	case out.Next:
		out.Settled = row.HeartbeatAt
	case h.Number == 0:
		out.Settled = row.HeartbeatAt.Add(-oldBeatAge)
	}
	return out, nil
}

// quietRow is what a quiet heartbeat finds. HeartbeatAt is what it was before.
type quietRow struct {
	ID          core.RunnerID   `db:"id"`
	HeartbeatAt time.Time       `db:"heartbeat_at"`
	Endpoint    string          `db:"endpoint"`
	ImagesSum   string          `db:"images_sum"`
	Removed     []core.RunnerID `db:"removed"` // the same for all, so only the first row has it
	Draining    bool            `db:"draining"`
}

// HeartbeatQuietRunners waits for no lock, so that no runner delays another one.
func (t *Tx) HeartbeatQuietRunners(ctx context.Context, list []controller.QuietBeat, terms controller.BeatTerms) (map[core.RunnerID]controller.Beaten, error) {
	var (
		ids                              []core.RunnerID
		epochs, numbers, answered, disks []int64
		started                          []time.Time
		capacities, allocated            []runnerapi.Capacity
		kvm, urls                        []string
		keys                             [][]byte
	)
	for _, b := range list {
		ids, epochs, numbers, answered = append(ids, b.ID), append(epochs, b.LeaseEpoch), append(numbers, b.Number), append(answered, b.Answered)
		started, disks, kvm = append(started, b.Info.StartedAt.Truncate(time.Microsecond)), append(disks, b.Info.DiskFreeMB), append(kvm, b.Info.KVM)
		capacities, allocated = append(capacities, b.Info.Capacity), append(allocated, b.Info.Allocated)
		keys, urls = append(keys, pgtx.OrNone(b.Info.EgressKey)), append(urls, b.Info.EgressURL)
	}
	rows, err := pgtx.Many[quietRow](ctx, t, `
		WITH u AS (
			UPDATE runners r SET heartbeat_at = now(), lease_expires_at = now() + make_interval(secs => @ttl), allocated = was.said,
				disk_free_mb = was.disk, beat = was.number, beat_at = now()
			FROM (
				SELECT w.id, w.heartbeat_at, b.number, b.allocated AS said, b.disk
				FROM unnest(@ids::text[], @epochs::bigint[], @started::timestamptz[], @numbers::bigint[], @answered::bigint[],
					@capacities::jsonb[], @allocated::jsonb[], @disks::bigint[], @kvm::text[], @keys::bytea[], @urls::text[])
					AS b (id, epoch, started, number, answered, capacity, allocated, disk, kvm, egress_key, egress_url)
				JOIN runners w ON w.id = b.id
				WHERE w.lease_epoch = b.epoch AND w.started_at = b.started AND w.fenced_at IS NULL
					AND w.beat_epoch = w.lease_epoch AND w.beat_at = w.heartbeat_at AND w.beat = b.answered AND b.number > b.answered
					AND w.capacity = b.capacity AND w.kvm = b.kvm AND w.egress_key = b.egress_key AND w.egress_url = b.egress_url
					AND NOT EXISTS (SELECT FROM store_holds s WHERE s.runner_id = w.id)
				ORDER BY w.id FOR NO KEY UPDATE OF w SKIP LOCKED
			) was
			WHERE r.id = was.id
			RETURNING r.id, was.heartbeat_at, r.endpoint, r.draining
		)
		SELECT u.id, u.heartbeat_at, u.endpoint, u.draining, coalesce((SELECT l.images_sum FROM runner_loads l WHERE l.runner_id = u.id), '') AS images_sum,
			CASE WHEN u.id = (SELECT min(id) FROM u) THEN
				ARRAY(SELECT i.runner_id FROM runner_identities i WHERE i.revoked_at > now() - make_interval(secs => @within) ORDER BY i.revoked_at DESC LIMIT `+maxRemoved+`)
			END AS removed
		FROM u ORDER BY u.id`,
		pgtx.Args{
			"ids": pgtx.Texts(ids), "epochs": epochs, "started": started, "numbers": numbers, "answered": answered, "capacities": capacities, "allocated": allocated,
			"disks": disks, "kvm": kvm, "keys": keys, "urls": urls, "ttl": terms.Lease.Seconds(), "within": terms.RemovedWithin.Seconds(),
		})
	out := make(map[core.RunnerID]controller.Beaten, len(rows))
	for _, row := range rows {
		out[row.ID] = controller.Beaten{Next: true, Settled: row.HeartbeatAt, ImagesSum: row.ImagesSum, Endpoint: row.Endpoint, Removed: rows[0].Removed, Draining: row.Draining}
	}
	return out, err
}

// refused says why a heartbeat is not applied. A runner must end its sandboxes only if its lease was given up, or if another
// process has registered since. It never must when the database knows less than the runner: then a failover has lost something.
func refused(id core.RunnerID, row leaseRow, h runnerapi.Heartbeat) error {
	sameProcess := row.StartedAt.Equal(h.Info.StartedAt.Truncate(time.Microsecond))
	switch {
	case h.LeaseEpoch > row.Epoch:
		return core.Errorf(core.Conflict, core.CodeStateConflict,
			"runner %s has a lease with epoch %d, but the database knows epochs up to %d only; it must register again", id, h.LeaseEpoch, row.Epoch)
	case row.Fenced:
		return core.Errorf(core.Unavailable, core.CodeRunnerLost, "the lease of runner %s with epoch %d was given up", id, h.LeaseEpoch)
	case !sameProcess: // also with the epoch of the row, which was given out twice if the database has lost the first time
		return core.Errorf(core.Unavailable, core.CodeRunnerLost,
			"the lease of runner %s with epoch %d was given up: another process of the runner has registered since", id, h.LeaseEpoch)
	case h.LeaseEpoch < row.Epoch: // it asked for the newer lease and has missed the answer
		return core.Errorf(core.Conflict, core.CodeStateConflict, "runner %s has a newer lease than epoch %d; it must register again", id, h.LeaseEpoch)
	case h.Answered > row.Number:
		return core.Errorf(core.Conflict, core.CodeStateConflict,
			"heartbeat %d of runner %s was answered, but the database knows heartbeats up to %d only; the runner must register again", h.Answered, id, row.Number)
	case row.Number > 0 && h.Number <= row.Number:
		return core.Errorf(core.Unavailable, core.CodeHeartbeatStale, "heartbeat %d of runner %s came after heartbeat %d and was not applied", h.Number, id, row.Number)
	}
	// The row has changed between two statements.
	return core.Errorf(core.Unavailable, core.CodeHeartbeatStale, "heartbeat %d of runner %s was not applied: its row changed meanwhile", h.Number, id)
}

type heldRow struct {
	ID          core.SandboxID      `db:"id"`
	WorkspaceID core.WorkspaceID    `db:"workspace_id"`
	State       core.WorkspaceState `db:"state"`
	Current     bool                `db:"current"`
	Settled     bool                `db:"settled"`
	Stalled     *time.Time          `db:"stalled"`
}

// RunnerSandboxes compares two moments of the database's clock for Settled. A sandbox that is being suspended is never current: its
// runner stops it before its operation writes that.
func (t *Tx) RunnerSandboxes(ctx context.Context, id core.RunnerID, which controller.HeldFilter) ([]controller.HeldSandbox, error) {
	if !which.All && len(which.Sandboxes)+len(which.Workspaces) == 0 {
		return nil, nil
	}
	rows, err := pgtx.Many[heldRow](ctx, t, `
		SELECT s.id, s.workspace_id, w.state, coalesce(w.sandbox_id = s.id, false) AND NOT (w.state = 'checkpointing' AND EXISTS (
			SELECT 1 FROM operations o WHERE o.workspace_id = w.id AND o.kind = @suspend AND o.state IN ('pending', 'running'))) AS current, coalesce(w.ready_at < @settled, false) AS settled,
			s.stalled_at AS stalled
		FROM sandboxes s JOIN workspaces w ON w.id = s.workspace_id
		WHERE s.runner_id = @id AND s.ended_at IS NULL AND (@all OR s.id = ANY(@ids::text[]) OR s.workspace_id = ANY(@workspaces::text[]))`,
		pgtx.Args{
			"id": id, "settled": which.Settled, "suspend": controller.OpSuspendWorkspace, "all": which.All,
			"ids": pgtx.Texts(which.Sandboxes), "workspaces": pgtx.Texts(which.Workspaces),
		})
	list := make([]controller.HeldSandbox, len(rows))
	for i, r := range rows {
		list[i] = controller.HeldSandbox{ID: r.ID, WorkspaceID: r.WorkspaceID, State: r.State, Current: r.Current, Settled: r.Settled, Stalled: pgtx.TimeOf(r.Stalled)}
	}
	return list, err
}

type stallRow struct {
	ID      core.SandboxID `json:"id"`
	At      *time.Time     `json:"at"`
	Code    *core.Code     `json:"code"`
	Message *string        `json:"message"`
}

// SetStalls locks the workspaces first, as everybody does: their events follow the order of their changes.
func (t *Tx) SetStalls(ctx context.Context, id core.RunnerID, list map[core.SandboxID]controller.Stall) error {
	if len(list) == 0 {
		return nil
	}
	rows := make([]stallRow, 0, len(list))
	for sandbox, s := range list {
		row := stallRow{ID: sandbox}
		if !s.Since.IsZero() {
			row.At, row.Code, row.Message = &s.Since, &s.Code, &s.Message
		}
		rows = append(rows, row)
	}
	if _, err := t.Exec(ctx, `
		SELECT FROM workspaces w WHERE w.id IN (SELECT s.workspace_id FROM sandboxes s WHERE s.id = ANY(@ids::text[]))
		ORDER BY w.id FOR NO KEY UPDATE`, pgtx.Args{"ids": pgtx.Texts(slices.Collect(maps.Keys(list)))}); err != nil {
		return err
	}
	_, err := t.Exec(ctx, `
		UPDATE sandboxes s SET stalled_at = x.at, stalled_code = x.code, stalled_message = x.message
		FROM jsonb_to_recordset(@rows::jsonb) AS x (id text, at timestamptz, code text, message text)
		WHERE s.id = x.id AND s.runner_id = @runner AND s.ended_at IS NULL`, pgtx.Args{"runner": id, "rows": rows})
	return err
}

type heldCheckpointRow struct {
	ID    core.CheckpointID    `db:"id"`
	State core.CheckpointState `db:"state"`
}

// HeldCheckpoints looks up each id. A checkpoint that is being captured has no runner yet; one that is sealed may have been fetched.
func (t *Tx) HeldCheckpoints(ctx context.Context, id core.RunnerID, ids []core.CheckpointID) (out controller.HeldCheckpoints, err error) {
	if len(ids) == 0 {
		return out, nil
	}
	rows, err := pgtx.Many[heldCheckpointRow](ctx, t, `
		SELECT id, state FROM checkpoints WHERE id = ANY(@ids::text[])
			AND (state IN ('sealed', 'deleted') OR state IN ('capturing', 'captured') AND (runner_id IS NULL OR runner_id = @runner))`,
		pgtx.Args{"ids": pgtx.Texts(ids), "runner": id})
	for _, r := range rows {
		switch r.State {
		case core.CheckpointCapturing:
			out.Capturing = append(out.Capturing, r.ID)
		case core.CheckpointDeleted:
			out.Deleted = append(out.Deleted, r.ID)
		case core.CheckpointCaptured, core.CheckpointSealed:
			out.Copies = append(out.Copies, r.ID)
		case core.CheckpointFailed: // the query leaves them out
		}
	}
	return out, err
}

type heldSumRow struct {
	Sandboxes   []core.SandboxID `db:"sandboxes"`
	Checkpoints int64            `db:"checkpoints"`
}

// HeldSums reads the copies' sum from an index alone, and takes out of it, one by one, those that do not count. The few sandboxes are added
// up here: a hash costs the database ten times as much as a row.
func (t *Tx) HeldSums(ctx context.Context, id core.RunnerID, but []core.CheckpointID) (sandboxes, checkpoints int64, err error) {
	row, err := pgtx.One[heldSumRow](ctx, t, nil, `
		SELECT ARRAY(SELECT id FROM sandboxes WHERE runner_id = @runner AND ended_at IS NULL) AS sandboxes,
			coalesce((SELECT bit_xor(coalesce(id_sum, coppice_id_sum(checkpoint_id))) FROM checkpoint_copies WHERE runner_id = @runner), 0)
				# coalesce((SELECT bit_xor(coalesce(id_sum, coppice_id_sum(checkpoint_id))) FROM checkpoint_copies WHERE runner_id = @runner AND checkpoint_id = ANY(@but::text[])), 0) AS checkpoints`,
		pgtx.Args{"runner": id, "but": pgtx.Texts(but)})
	return beats.Sum(row.Sandboxes...), row.Checkpoints, err
}
