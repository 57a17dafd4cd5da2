package fleetrows

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

const runnerColumns = `
	r.id, r.hostname, r.endpoint, r.data_url, r.data_own_cert, r.version, r.class, r.capacity, r.allocated, r.kvm, r.disk_free_mb, r.draining, r.fenced_at IS NOT NULL AS fenced, r.lease_epoch,
	r.lease_expires_at, r.lease_expires_at > now() AS fresh, r.started_at, r.heartbeat_at, r.egress_key, r.egress_url`

type runnerRow struct {
	ID             core.RunnerID         `db:"id"`
	Hostname       string                `db:"hostname"`
	Endpoint       string                `db:"endpoint"`
	DataURL        string                `db:"data_url"`
	DataOwnCert    bool                  `db:"data_own_cert"`
	Version        int                   `db:"version"`
	Class          runnerapi.RunnerClass `db:"class"`
	Capacity       runnerapi.Capacity    `db:"capacity"`
	Allocated      runnerapi.Capacity    `db:"allocated"`
	KVM            string                `db:"kvm"`
	DiskFreeMB     int64                 `db:"disk_free_mb"`
	Draining       bool                  `db:"draining"`
	Fenced         bool                  `db:"fenced"`
	LeaseEpoch     int64                 `db:"lease_epoch"`
	LeaseExpiresAt time.Time             `db:"lease_expires_at"`
	Fresh          bool                  `db:"fresh"`
	StartedAt      time.Time             `db:"started_at"`
	HeartbeatAt    time.Time             `db:"heartbeat_at"`
	EgressKey      []byte                `db:"egress_key"`
	EgressURL      string                `db:"egress_url"`
}

func (r runnerRow) runner() controller.Runner {
	return controller.Runner{
		Info: runnerapi.Info{
			RunnerID: r.ID, Version: r.Version, Hostname: r.Hostname, Class: r.Class, Capacity: r.Capacity, Allocated: r.Allocated,
			StartedAt: r.StartedAt, KVM: r.KVM, DiskFreeMB: r.DiskFreeMB, EgressKey: r.EgressKey, EgressURL: r.EgressURL,
		},
		Endpoint: r.Endpoint, DataURL: r.DataURL, DataOwnCert: r.DataOwnCert, Fresh: r.Fresh, Draining: r.Draining, Fenced: r.Fenced, LeaseEpoch: r.LeaseEpoch, LeaseExpiresAt: r.LeaseExpiresAt, HeartbeatAt: r.HeartbeatAt,
	}
}

func noRunner(id core.RunnerID) error {
	return core.Errorf(core.NotFound, core.CodeRunnerNotFound, "there is no runner %s; it must register first", id)
}

// maxEpoch bounds the epoch that a runner says it had: what follows never overflows the column.
const maxEpoch = 1 << 53

// RegisterRunner begins a new lease epoch, which is greater than every earlier one, those that the database has lost included.
func (t *Tx) RegisterRunner(ctx context.Context, reg runnerapi.Register, ttl time.Duration) (controller.Runner, error) {
	i := reg.Info
	row, err := pgtx.One[runnerRow](ctx, t, nil, `
		WITH r AS (
			INSERT INTO runners (id, hostname, endpoint, data_url, data_own_cert, version, class, class_key, capacity, allocated, kvm, disk_free_mb, started_at, egress_key, egress_url, lease_epoch, lease_expires_at, beat_epoch, beat_at)
			VALUES (@id, @hostname, @endpoint, @data_url, @data_own_cert, @version, @class, @class_key, @capacity, @allocated, @kvm, @disk, @started, @egress_key, @egress_url, @epoch::bigint + 1, now() + make_interval(secs => @ttl), @epoch::bigint + 1, now())
			ON CONFLICT (id) DO UPDATE SET hostname = excluded.hostname, endpoint = excluded.endpoint, data_url = excluded.data_url, data_own_cert = excluded.data_own_cert, version = excluded.version, class = excluded.class,
				class_key = excluded.class_key, capacity = excluded.capacity, allocated = excluded.allocated, kvm = excluded.kvm,
				disk_free_mb = excluded.disk_free_mb, started_at = excluded.started_at, egress_key = excluded.egress_key, egress_url = excluded.egress_url, lease_epoch = greatest(runners.lease_epoch, @epoch::bigint) + 1,
				beat = 0, beat_epoch = greatest(runners.lease_epoch, @epoch::bigint) + 1, beat_at = now(), lease_expires_at = excluded.lease_expires_at, registered_at = now(), heartbeat_at = now(), fenced_at = NULL, removed_at = NULL
			RETURNING *
		)
		SELECT`+runnerColumns+` FROM r`,
		pgtx.Args{
			"id": i.RunnerID, "hostname": i.Hostname, "endpoint": reg.Endpoint, "data_url": reg.DataURL, "data_own_cert": reg.OwnDataCert, "version": i.Version, "class": i.Class, "class_key": pgtx.ClassKey(i.Class),
			"capacity": i.Capacity, "allocated": i.Allocated, "kvm": i.KVM, "disk": i.DiskFreeMB, "started": i.StartedAt, "egress_key": pgtx.OrNone(i.EgressKey), "egress_url": i.EgressURL, "ttl": ttl.Seconds(),
			"epoch": min(max(reg.LeaseEpoch, 0), maxEpoch),
		})
	return row.runner(), err
}

// Runner returns one.
func (t *Tx) Runner(ctx context.Context, id core.RunnerID) (controller.Runner, error) {
	row, err := pgtx.One[runnerRow](ctx, t, noRunner(id), `SELECT`+runnerColumns+` FROM runners r WHERE r.id = @id`, pgtx.Args{"id": id})
	return row.runner(), err
}

// DrainRunner says whether a runner gets new sandboxes.
func (t *Tx) DrainRunner(ctx context.Context, id core.RunnerID, on bool) (controller.Runner, error) {
	row, err := pgtx.One[runnerRow](ctx, t, noRunner(id), `
		WITH r AS (UPDATE runners SET draining = @on WHERE id = @id AND removed_at IS NULL RETURNING *) SELECT`+runnerColumns+` FROM r`, pgtx.Args{"id": id, "on": on})
	return row.runner(), err
}

// Runners lists, newest first.
func (t *Tx) Runners(ctx context.Context, p controller.Page) ([]controller.Runner, error) {
	q := pgtx.NewFilter("r", p, false)
	q.Add("r.removed_at IS NULL", "", nil)
	rows, err := pgtx.Many[runnerRow](ctx, t, `SELECT`+runnerColumns+` FROM runners r`+q.Where()+q.Tail(), q.Args)
	return pgtx.Map(rows, runnerRow.runner), err
}

// FenceRunners gives up on runners that have been silent for so long that they have killed their sandboxes themselves. It leaves
// those out that somebody else has locked.
func (t *Tx) FenceRunners(ctx context.Context, hard time.Duration, limit int) ([]core.RunnerID, error) {
	rows, err := pgtx.Many[core.RunnerID](ctx, t, `
		WITH due AS (
			SELECT id FROM runners WHERE lease_expires_at < now() - make_interval(secs => @hard) AND fenced_at IS NULL
			ORDER BY id LIMIT @limit FOR NO KEY UPDATE SKIP LOCKED
		)
		UPDATE runners r SET fenced_at = now(), lease_epoch = r.lease_epoch + 1 FROM due WHERE r.id = due.id RETURNING r.id`,
		pgtx.Args{"hard": hard.Seconds(), "limit": limit})
	if err != nil {
		return nil, err
	}
	// What they were fetching nobody fetches any more, but for what they have captured on it: it is on their hosts, and they end the fetch when they
	// are back. The rows are those of all that have been given up: one may have been at a heartbeat then.
	_, err = t.Exec(ctx, `
		DELETE FROM store_holds h USING runners r WHERE r.id = h.runner_id AND r.fenced_at IS NOT NULL AND (r.removed_at IS NOT NULL
			OR NOT EXISTS (SELECT 1 FROM checkpoints c WHERE c.runner_id = r.id AND c.state IN ('capturing', 'captured')))`, pgtx.Args{})
	return rows, err
}
