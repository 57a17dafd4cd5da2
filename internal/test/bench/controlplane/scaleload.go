package controlplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// singlesTime bounds the forks by one client with one number of runners; the first hundred are always made.
const singlesTime = 90 * time.Second

// measureForks measures fork operations with the present runners: first the time of each fork by one client, then the
// forks per second by several clients. The forked workspaces are terminated outside of the measured times.
func (c *cell) measureForks(ctx context.Context, r *scaleReport) ([]statement, error) {
	var times report.Samples
	began := time.Now()
	for i := range c.cfg.warmups + c.cfg.singles {
		if len(times) >= min(100, c.cfg.singles) && i > c.cfg.warmups && time.Since(began) > singlesTime {
			break // the machine is slow or busy; the report has the number
		}
		if i == c.cfg.warmups {
			times = nil
			if err := c.countStatements(ctx); err != nil {
				return nil, err
			}
		}
		g, err := c.fork(ctx)
		if err != nil {
			return nil, err
		}
		times.Add(g.took)
		if err := g.end(ctx); err != nil {
			return nil, err
		}
	}
	list, err := c.statements(ctx)
	if err != nil {
		return nil, err
	}
	runners := fmt.Sprint(len(c.runners))
	r.ForkOpMS[runners] = times.Quantiles()
	if len(c.runners) < c.cfg.clients {
		return list, nil // the slots of few runners do not last
	}
	// Only half of the free slots are used, so that no runner is full by chance.
	most := int64(len(c.runners)*(scaleSlots-workspaceEach)/2 - 1)
	var begun atomic.Int64
	made := make([][]grown, c.cfg.clients)
	meter, err := c.plane.meter()
	if err != nil {
		return nil, err
	}
	start := time.Now()
	busy, err := report.Together(c.cfg.clients, func(n int) (report.Samples, error) {
		var mine report.Samples
		for time.Since(start) < c.cfg.sustain && begun.Add(1) <= most {
			g, err := c.fork(ctx)
			if err != nil {
				return nil, err
			}
			mine.Add(g.took)
			made[n] = append(made[n], g)
		}
		return mine, nil
	})
	if err != nil {
		return nil, err
	}
	used, err := meter.used()
	if err != nil {
		return nil, err
	}
	r.ForkOpsPerS = float64(len(busy)) / used.wall.Seconds()
	r.ForkOpsPerSBy[runners] = r.ForkOpsPerS
	r.ForkOpBusyMS, r.ForkOpBusyCPU, r.ForkOpBusyDBCPU = busy.Quantiles(), used.all()/float64(len(busy)), used.server/float64(len(busy))
	_, err = report.Together(c.cfg.clients, func(n int) (report.Samples, error) {
		for _, g := range made[n] {
			if err := g.end(ctx); err != nil {
				return nil, err
			}
		}
		return nil, nil
	})
	return list, errors.Join(err, c.beats.problem())
}

// heartbeatLoad is the cost of all runners' heartbeats.
type heartbeatLoad struct {
	Seconds      float64            `json:"seconds"`
	Beats        int64              `json:"beats"`
	Whole        int64              `json:"whole"`             // of which named everything
	Refused      int64              `json:"not_answered"`      // their runners sent others
	Problem      string             `json:"problem,omitempty"` // of the first heartbeat of the run that was not answered
	JoinS        float64            `json:"join_s"`            // until all runners of the last step had named everything, who began at once
	JoinRefused  int64              `json:"join_not_answered"`
	IdleSeconds  float64            `json:"idle_seconds"`
	IdleDBShare  float64            `json:"idle_db_cpu_share"`    // of one core, while no runner beats
	IdleDBShares map[string]float64 `json:"idle_db_cpu_share_by"` // by what the processes of the server are
	DBShares     map[string]float64 `json:"db_cpu_share_by"`
	ProcessShare float64            `json:"process_cpu_share"` // of one core: the controllers and the simulated runners
	UsageBytes   int64              `json:"usage_bytes"`       // of what sandboxes use, one row each
	UsageRows    int64              `json:"usage_rows"`
	Idle         []statement        `json:"idle_statements"` // the most expensive ones, while no runner beats
	Statements   []statement        `json:"statements"`      // the most expensive ones
}

// measureHeartbeats measures the database's work for the heartbeats of all runners, without any other load. The figure
// includes its own background work and that of the controllers' loops.
func (c *cell) measureHeartbeats(ctx context.Context, r *scaleReport) error {
	if _, err := c.settle(ctx); err != nil {
		return err
	}
	h := &r.Heartbeats
	if err := c.silent(ctx, func() error {
		if err := c.countStatements(ctx); err != nil {
			return err
		}
		meter, err := c.plane.meter()
		if err != nil {
			return err
		}
		if err := pace.Pause(ctx, c.cfg.beats/6); err != nil {
			return err
		}
		used, err := meter.used()
		if err != nil {
			return err
		}
		h.IdleSeconds, h.IdleDBShare, h.IdleDBShares = used.wall.Seconds(), used.serverShare(), used.serverShares()
		h.Idle, err = c.mostExpensive(ctx)
		return err
	}); err != nil {
		return err
	}
	if err := pace.Pause(ctx, c.cfg.beatEvery*6/5); err != nil { // until they are spread evenly again
		return err
	}
	if err := c.countStatements(ctx); err != nil {
		return err
	}
	sent, whole, refused := c.beats.sent.Load(), c.beats.whole.Load(), c.beats.refused.Load()
	meter, err := c.plane.meter()
	if err != nil {
		return err
	}
	if err := pace.Pause(ctx, c.cfg.beats); err != nil {
		return err
	}
	used, err := meter.used()
	if err != nil {
		return err
	}
	h.Seconds, h.Beats, h.Whole, h.Refused = used.wall.Seconds(), c.beats.sent.Load()-sent, c.beats.whole.Load()-whole, c.beats.refused.Load()-refused
	h.ProcessShare, r.HeartbeatDBCPUShare, h.DBShares = used.selfShare(), used.serverShare(), used.serverShares()
	if h.Statements, err = c.mostExpensive(ctx); err != nil {
		return err
	}
	err = c.db.QueryRow(ctx, `SELECT (SELECT count(*) FROM usage_totals), pg_total_relation_size('usage_totals')`).Scan(&h.UsageRows, &h.UsageBytes)
	if h.Beats == 0 {
		err = errors.Join(err, errors.New("no runner beat"))
	}
	return errors.Join(err, c.beats.problem())
}

// churn is what an hour of forks leaves behind.
type churn struct {
	PerSecond     float64     `json:"forks_per_s"` // that the hour stands for
	Asked         int         `json:"cycles_asked"`
	Cycles        int         `json:"cycles"`      // a fork, of each fourth a checkpoint, and its end
	Checkpoints   int         `json:"checkpoints"` // made, and a half of them deleted
	Seconds       float64     `json:"seconds"`
	BytesPerCycle float64     `json:"bytes_per_cycle"`
	Before        []tableSize `json:"before"`
	After         []tableSize `json:"after"`
}

// measureChurn makes the rows of an hour of forks as fast as the machine allows. Autovacuum has its default settings,
// so it runs less often than it would in an hour, and more garbage is left than would be.
func (c *cell) measureChurn(ctx context.Context, r *scaleReport) error {
	h := &r.Churn
	h.PerSecond, h.Asked = c.cfg.churnRate, int(c.cfg.churnRate*3600*c.cfg.churnPart)
	var err error
	if h.Before, err = c.tableSizes(ctx); err != nil {
		return err
	}
	var begun, cycles, checkpoints atomic.Int64
	start := time.Now()
	if _, err := report.Together(c.cfg.clients, func(int) (report.Samples, error) {
		for time.Since(start) < c.cfg.churnTime {
			n := begun.Add(1)
			if n > int64(h.Asked) {
				return nil, nil
			}
			made, err := c.cycle(ctx, n)
			if err != nil {
				return nil, err
			}
			checkpoints.Add(made)
			cycles.Add(1)
		}
		return nil, nil
	}); err != nil {
		return err
	}
	h.Seconds, h.Cycles, h.Checkpoints = time.Since(start).Seconds(), int(cycles.Load()), int(checkpoints.Load())
	if err := c.exec(ctx, "ANALYZE"); err != nil { // what ended a moment ago is counted too
		return err
	}
	if h.After, err = c.tableSizes(ctx); err != nil {
		return err
	}
	var grown int64
	for _, t := range h.After {
		grown += t.bytes()
	}
	for _, t := range h.Before {
		grown -= t.bytes()
	}
	h.BytesPerCycle = float64(grown) / float64(max(1, h.Cycles))
	return errors.Join(c.beats.problem(), verify(ctx, c.db, false))
}

// cycle is the life of one fork.
func (c *cell) cycle(ctx context.Context, n int64) (checkpoints int64, err error) {
	g, err := c.fork(ctx)
	if err != nil {
		return 0, err
	}
	var made coppice.CheckpointID
	if n%4 == 0 {
		cp, err := g.client.CreateCheckpoint(ctx, g.workspace, coppice.CreateCheckpointRequest{})
		if err != nil {
			return 0, err
		}
		made, checkpoints = cp.ID, 1
	}
	if err := g.end(ctx); err != nil {
		return checkpoints, err
	}
	if n%8 == 0 {
		return checkpoints, g.client.DeleteCheckpoint(ctx, made)
	}
	return checkpoints, nil
}

// retentionRound is one round of a policy over a large tree.
type retentionRound struct {
	Nodes     int     `json:"nodes"`
	PlanS     float64 `json:"plan_s"`  // to find out what goes
	PruneS    float64 `json:"prune_s"` // to find it out again and delete it
	Deleted   int     `json:"deleted"`
	Truncated bool    `json:"truncated"` // there is more
	Problem   string  `json:"problem,omitempty"`
}

// measureRetention inserts a tree and measures a round of a policy on it: first the plan, which the server makes every
// minute, then the deletions of one round.
func (c *cell) measureRetention(ctx context.Context, r *scaleReport) error {
	project := len(c.runners) * projectsEach
	values := c.source.arguments()
	values["project"], values["token"], values["nodes"] = string(projectID(project)), projectToken(project), c.cfg.searchNodes
	values["searcher"] = string(numbered[core.WorkspaceID]("ws", int64(project)*livesEach+1))
	if err := runAll(ctx, c.db, searchSQL, values); err != nil {
		return err
	}
	if err := errors.Join(c.exec(ctx, "VACUUM ANALYZE checkpoints", "CHECKPOINT"), verify(ctx, c.db, false)); err != nil {
		return err
	}
	client, err := c.client(0, projectToken(project))
	if err != nil {
		return err
	}
	h := &r.Retention
	h.Nodes = c.cfg.searchNodes
	policy := coppice.PruneRequest{KeepBest: coppice.KeepBest{Annotation: "score", K: c.cfg.searchNodes / 1000}, KeepPathToRoot: true, DryRun: true}
	start := time.Now()
	if _, err = client.PruneCheckpoints(ctx, string(searchRoot), policy); err == nil {
		h.PlanS = time.Since(start).Seconds()
		policy.DryRun = false
		start = time.Now()
		var done coppice.PruneResult
		if done, err = client.PruneCheckpoints(ctx, string(searchRoot), policy); err == nil {
			h.PruneS, h.Deleted, h.Truncated = time.Since(start).Seconds(), len(done.Items), done.Truncated
			r.Retention1M = h.PlanS + h.PruneS
		}
	}
	if err != nil { // it is the figure
		h.Problem = fmt.Sprintf("after %.1f s: %v", time.Since(start).Seconds(), err)
	}
	return ctx.Err()
}

// massFence is the loss of all runners at once.
type massFence struct {
	Runners    int     `json:"runners"`
	Workspaces int     `json:"workspaces"`
	Left       int     `json:"left"` // that live when the time was over
	MarkedS    float64 `json:"runners_marked_s"`
}

// measureFence silences all runners for longer than the cluster waits, and measures until no workspace lives. It is the
// last stage, because nothing lives after it.
func (c *cell) measureFence(ctx context.Context, r *scaleReport) error {
	h := &r.Fence
	h.Runners = len(c.runners)
	const live = `SELECT count(*) FROM workspaces WHERE ended_at IS NULL`
	if err := c.db.QueryRow(ctx, live).Scan(&h.Workspaces); err != nil {
		return err
	}
	c.beats.gate.Lock()
	defer c.beats.gate.Unlock()
	start := time.Now()
	if err := c.exec(ctx, `UPDATE runners SET lease_expires_at = now() - interval '1 day'`); err != nil {
		return err
	}
	for {
		var marked int
		if err := c.db.QueryRow(ctx, `SELECT count(*), (`+live+`) FROM runners WHERE fenced_at IS NOT NULL`).Scan(&marked, &h.Left); err != nil {
			return err
		}
		took := time.Since(start).Seconds()
		if marked == h.Runners && h.MarkedS == 0 {
			h.MarkedS = took
		}
		if marked == h.Runners && h.Left == 0 {
			r.FenceAllS = took
			return verify(ctx, c.db, false)
		}
		if took > c.cfg.fenceTime.Seconds() {
			return nil // it is the figure
		}
		if err := pace.Pause(ctx, 250*time.Millisecond); err != nil {
			return err
		}
	}
}

// measureSizes measures how many bytes a checkpoint takes in the database while it exists.
func (c *cell) measureSizes(ctx context.Context, r *scaleReport) error {
	list, err := c.tableSizes(ctx)
	if err != nil {
		return err
	}
	r.Tables = list[:min(len(list), 15)]
	var nodes int64
	if err := c.db.QueryRow(ctx, "SELECT count(*) FROM checkpoints").Scan(&nodes); err != nil {
		return err
	}
	var bytes int64
	for _, t := range list {
		if slices.Contains([]string{"checkpoints", "checkpoint_copies"}, t.Table) {
			bytes += t.bytes()
		}
	}
	r.Checkpoints, r.BytesPerCheckpoint = nodes, float64(bytes)/float64(nodes)
	return c.db.QueryRow(ctx, `SELECT (SELECT count(*) FROM projects), (SELECT count(*) FROM workspaces WHERE ended_at IS NULL)`).Scan(&r.Projects, &r.Workspaces)
}
