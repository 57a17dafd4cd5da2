package controlplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/undo"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// scaleControllers is the number of controllers that share the database.
const scaleControllers = 3

// cell is one database with its controllers and simulated runners.
type cell struct {
	cfg       scaleConfig
	plane     *plane
	dsn       string
	db        *pgx.Conn // a superuser's, for planting and looking
	stations  []station
	transport *http.Transport // of clients
	way       *http.Client    // of runners, to controllers

	runners []*runnertest.Runner
	stepOf  []int // of each runner: the planting that it came with
	like    runnerapi.Checkpoint
	source  planting // what all rows are like
	turns   atomic.Int64

	runCtx context.Context // the life of the runners
	beats  beatCount
}

// beatCount counts the results of heartbeats.
type beatCount struct {
	gate                 sync.RWMutex // held by each heartbeat, and alone by who stops them
	group                sync.WaitGroup
	sent, whole, refused atomic.Int64

	// mu guards what follows.
	mu        sync.Mutex
	lost      error // a runner that was given up
	first     error // a heartbeat that was not answered: its runner sends another
	lastWhole time.Time
}

// note records the result of a heartbeat.
func (b *beatCount) note(whole bool, err error) {
	b.sent.Add(1)
	b.mu.Lock()
	defer b.mu.Unlock()
	if whole {
		b.whole.Add(1)
		b.lastWhole = time.Now()
	}
	if err != nil {
		b.refused.Add(1)
		b.first = cmp.Or(b.first, err)
	}
	if core.CodeOf(err) == core.CodeRunnerLost {
		b.lost = err
	}
}

// problem returns why the measurements are worthless: a runner was given up.
func (b *beatCount) problem() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.lost == nil {
		return nil
	}
	return fmt.Errorf("a runner was given up: %w", b.lost)
}

// firstProblem returns the error of the first heartbeat without an answer, and "" if all had one.
func (b *beatCount) firstProblem() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.first == nil {
		return ""
	}
	return b.first.Error()
}

// openCell starts controllers on an empty database.
func openCell(ctx context.Context, plane *plane, cfg scaleConfig, steps *undo.Stack) (*cell, error) {
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c := &cell{cfg: cfg, plane: plane, runCtx: life}
	steps.Push("runners", func(context.Context) error {
		cancel()
		c.beats.group.Wait()
		for _, r := range c.runners {
			r.Close()
		}
		return nil
	})
	var err error
	if c.dsn, c.stations, err = plane.begin(ctx, steps, scaleControllers, controller.Limits{
		Open: controller.Rate{PerSecond: 1e6, Burst: 1 << 20}, // all keys come from one address
	}); err != nil {
		return nil, err
	}
	if c.db, err = pgx.Connect(ctx, c.dsn); err != nil {
		return nil, err
	}
	steps.Push("connection", c.db.Close)
	if _, err := c.db.Exec(ctx, "CREATE EXTENSION pg_stat_statements"); err != nil {
		return nil, err
	}
	c.transport = &http.Transport{MaxIdleConnsPerHost: 64}
	c.way = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1024}, Timeout: time.Minute}
	steps.Push("connections", func(context.Context) error {
		c.transport.CloseIdleConnections()
		c.way.CloseIdleConnections()
		return nil
	})
	return c, nil
}

// exec runs statements on the bench's own connection.
func (c *cell) exec(ctx context.Context, statements ...string) error {
	for _, sql := range statements {
		if _, err := c.db.Exec(ctx, sql); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
	return nil
}

// begin makes the first runner, and the workspace and the checkpoint that are the models of all rows.
func (c *cell) begin(ctx context.Context) error {
	if err := c.addRunners(ctx, 0, 0, 1); err != nil {
		return err
	}
	client, err := c.client(0, benchSecretToken)
	if err != nil {
		return err
	}
	ws, cp, err := seed(ctx, client)
	if err != nil {
		return err
	}
	c.source = planting{workspace: ws, checkpoint: cp}
	c.like, _ = c.runners[0].Held(core.CheckpointID(cp))
	return nil
}

// addRunners makes runners from..to-1 and registers them. They do not send heartbeats yet.
func (c *cell) addRunners(ctx context.Context, step, from, to int) error {
	for n := from; n < to; n++ {
		r := runnertest.New(runnertest.Config{
			ID: runnerID(n), Secret: benchSecret, Client: c.way,
			Capacity: runnerapi.Capacity{Sandboxes: scaleSlots, VCPUs: 4 * scaleSlots, MemoryMiB: 1024 * scaleSlots},
		})
		if err := r.Listen(); err != nil {
			return err
		}
		c.runners, c.stepOf = append(c.runners, r), append(c.stepOf, step)
		if err := r.Register(ctx, c.stations[n%scaleControllers].inner, benchSecret); err != nil {
			return fmt.Errorf("register runner %d: %w", n, err)
		}
	}
	return nil
}

// grow inserts the rows of runners from..to-1 and starts their heartbeats.
func (c *cell) grow(ctx context.Context, step, from, to int) error {
	p := c.source
	p.step, p.from, p.to = step, from, to
	if err := p.run(ctx, c.db, plantSQL); err != nil {
		return err
	}
	if err := c.addRunners(ctx, step, max(from, len(c.runners)), to); err != nil {
		return err
	}
	if err := p.run(ctx, c.db, liveSQL); err != nil {
		return err
	}
	now := time.Now().UTC()
	for n := from; n < to; n++ {
		var sandboxes []runnerapi.Sandbox
		for k := range workspaceEach {
			sandboxes = append(sandboxes, liveInstance(step, n*workspaceEach+k, c.like, now))
		}
		var ids []core.CheckpointID
		for p := n * projectsEach; p < (n+1)*projectsEach; p++ {
			for node := range nodesEach {
				ids = append(ids, nodeID(step, node, p))
			}
		}
		c.runners[n].Adopt(c.like, sandboxes, ids)
	}
	// Real rows grow over weeks, not in a minute. So the database's background work for the new rows is done before
	// anything is measured.
	if err := c.exec(ctx, "VACUUM ANALYZE", "CHECKPOINT"); err != nil {
		return err
	}
	for n := from; n < to; n++ {
		c.beats.group.Go(func() { c.follow(n) })
	}
	return nil
}

// follow sends a runner's heartbeats, three times per lease, until the cell is closed or the cluster has given the
// runner up.
func (c *cell) follow(n int) {
	ctx, r := c.runCtx, c.runners[n]
	wait := c.stagger()
	for at := n; pace.Pause(ctx, wait) == nil; {
		asked := time.Now()
		c.beats.gate.RLock()
		if time.Since(asked) > time.Second { // all were stopped; they do not go on as one
			c.beats.gate.RUnlock()
			wait = c.stagger()
			continue
		}
		out, err := r.BeatDifferences(ctx, c.stations[at%scaleControllers].inner, benchSecret)
		c.beats.gate.RUnlock()
		if ctx.Err() != nil {
			return
		}
		c.beats.note(out.Whole, err)
		wait = pace.Spread(min(out.Next, c.cfg.beatEvery))
		switch {
		case core.CodeOf(err) == core.CodeRunnerLost:
			return
		case err != nil:
			at, wait = at+1, time.Second // as a runner does
		}
	}
}

func (c *cell) stagger() time.Duration { return rand.N(c.cfg.beatEvery) } //nolint:gosec // G404: no secret

// silent runs a function while no runner sends heartbeats. The leases are long enough for that.
func (c *cell) silent(ctx context.Context, do func() error) error {
	if err := c.exec(ctx, `UPDATE runners SET lease_expires_at = now() + interval '1 hour'`); err != nil {
		return err
	}
	c.beats.gate.Lock()
	defer c.beats.gate.Unlock()
	return do()
}

// settle waits until all runners have reported everything to the controllers and send only differences. It returns how
// long that took.
func (c *cell) settle(ctx context.Context) (seconds float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	start := time.Now()
	for whole := int64(-1); c.beats.whole.Load() != whole || c.beats.sent.Load() < 2*int64(len(c.runners)); {
		whole = c.beats.whole.Load()
		if err := pace.Pause(ctx, c.cfg.beatEvery*6/5); err != nil {
			return 0, fmt.Errorf("the runners did not come to rest: %w; %d heartbeats were not answered: %s", errors.Join(err, c.beats.problem()), c.beats.refused.Load(), c.beats.firstProblem())
		}
	}
	c.beats.mu.Lock()
	seconds = c.beats.lastWhole.Sub(start).Seconds()
	c.beats.mu.Unlock()
	return max(0, seconds), c.beats.problem()
}

// client is one of a key, at one of the controllers.
func (c *cell) client(station int, token string) (*coppice.Client, error) {
	return coppice.New(coppice.Config{Server: c.stations[station%scaleControllers].server, Token: token, Transport: c.transport})
}

// fork grows a workspace from a checkpoint of a random project, on each runner in turn, at each controller in turn.
func (c *cell) fork(ctx context.Context) (grown, error) {
	turn := int(c.turns.Add(1))
	runner := turn % len(c.runners)
	project := runner*projectsEach + rand.IntN(projectsEach)                 //nolint:gosec // G404: no secret
	id := nodeID(c.stepOf[runner], 1+rand.IntN(nodesEach-1), project)        //nolint:gosec // G404: likewise
	client, err := c.client(turn/len(c.runners)+turn, projectToken(project)) // every runner's forks go through every controller
	if err != nil {
		return grown{}, err
	}
	return fork(ctx, client, string(id))
}
