// Package prepare asks runners to prepare machines for checkpoints, because clients have said that they
// will fork them soon. Package runner/prepared makes the machines and gives them to forks.
//
// What a client asks for is a row. One controller sends all rows to the runners every few seconds
// (Manager.Round), and each controller sends what it has just written (Manager.Run). A runner forgets an ask
// that is not renewed, so a crash of a controller leaves no machine behind, and a runner that was
// restarted learns of its asks again. The runner of an ask is the one that a fork would go to: one
// that holds the checkpoint and takes new sandboxes, the emptiest first. Its answer has counts since it
// first heard of the ask; the row adds up what they have grown by.
package prepare

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// Bounds of what can be asked for.
const (
	MaxCount   = 16 // machines of a checkpoint
	MaxProject = 64 // machines of all checkpoints of a project

	DefaultTTL = 2 * time.Minute
	MaxTTL     = time.Hour
)

const (
	// Every is the time between two rounds.
	Every = 3 * time.Second
	// lease is how long a runner keeps an ask that is not renewed.
	lease = 15 * time.Second
	// callTime bounds a call of a runner in a round: the others must not lose their asks meanwhile.
	callTime = 5 * time.Second
	// maxCalls bounds the runners that are called at the same time.
	maxCalls = 16
	// maxWaiting bounds the asks that wait to be sent at once. Those beyond it wait for the next round.
	maxWaiting = 256
	batch      = runnerapi.MaxPrepareAsks
)

// Wanted is what a client asks for. The zero value asks for nothing.
type Wanted struct {
	Count int           `json:"count"`
	TTL   time.Duration `json:"ttl,omitempty"` // 0: DefaultTTL
}

// Set writes what is wanted for a checkpoint that the same transaction inserts. It changes nothing if nothing is wanted.
func (w Wanted) Set(ctx context.Context, tx AskTx, project core.ProjectID, id core.CheckpointID) error {
	if w.Count == 0 {
		return nil
	}
	_, err := w.set(ctx, tx, project, id)
	return err
}

func (w Wanted) set(ctx context.Context, tx AskTx, project core.ProjectID, id core.CheckpointID) (State, error) {
	if w.TTL == 0 {
		w.TTL = DefaultTTL
	}
	if w.Count < 0 || w.Count > MaxCount || w.TTL < time.Second || w.TTL > MaxTTL {
		return State{}, core.Errorf(core.Invalid, core.CodeInvalidField, "prepare: at most %d machines, for at least 1 s and at most %s", MaxCount, MaxTTL)
	}
	return tx.SetPrepared(ctx, project, id, w, MaxProject)
}

// State is what is known of the machines of a checkpoint.
type State struct {
	Asked       int       // 0: none are asked for any more
	ExpiresAt   time.Time // zero if none were ever asked for
	RunnerID    core.RunnerID
	Max         int // machines that the runner keeps for all
	Ready       int
	MemoryBytes int64
	GivenUp     bool // none was taken in its time
	Counts      runnerapi.PreparedCounts
}

// Ask is a row that is to be sent to a runner.
type Ask struct {
	Checkpoint core.CheckpointID
	Project    core.ProjectID
	Egress     core.EgressPolicy // of forks that do not say otherwise
	Count      int               // 0: the ask has ended, and the runner may not know it yet
	Version    int64
	Moves      int64         // how often it went to another runner
	Left       time.Duration // until it ends
	RunnerID   core.RunnerID
	Endpoint   string // empty: no runner holds the checkpoint and takes new sandboxes
}

// Report is the answer of a runner to an ask.
type Report struct {
	Checkpoint core.CheckpointID
	Moves      int64
	Max        int
	runnerapi.PreparedState
}

// AskTx writes what is asked for.
type AskTx interface {
	// SetPrepared replaces what is asked for. It fails with QUOTA_EXCEEDED if the project asked for more than most machines then, with NotFound
	// if the project has no such checkpoint, and with CHECKPOINT_NOT_READY if the checkpoint is gone.
	SetPrepared(ctx context.Context, project core.ProjectID, id core.CheckpointID, w Wanted, most int) (State, error)
}

// Tx reads and writes rows.
type Tx interface {
	AskTx
	Checkpoint(ctx context.Context, id core.CheckpointID) (model.Checkpoint, error)
	Prepared(ctx context.Context, id core.CheckpointID) (State, error)
	// PreparedAsks returns asks that have not ended, by the order of the ids after one, and chooses their runners. Those of ids alone, if there are any.
	PreparedAsks(ctx context.Context, ids []core.CheckpointID, after core.CheckpointID, limit int) ([]Ask, error)
	// NotePrepared adds up what runners have answered. It ignores the answer of a runner to which the ask no longer goes.
	NotePrepared(ctx context.Context, list []Report) error
	// EndPrepared ends asks whose time is up or whose checkpoint is gone, and returns how many.
	EndPrepared(ctx context.Context, limit int) (int, error)
}

// Store runs transactions. Package controller/postgres/preparerows has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	// InSystem runs fn in a transaction that sees all projects and commits when it returns nil.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Runners calls runners by their endpoint.
type Runners interface {
	// Prepare tells a runner for which checkpoints it is to prepare machines.
	Prepare(ctx context.Context, endpoint string, in runnerapi.Prepare) (runnerapi.Prepared, error)
}

// Config says what a manager works with.
type Config struct {
	// Authority returns the certificate that the guests of a project trust.
	Authority func(ctx context.Context, project core.ProjectID) (string, error)
	Log       *slog.Logger
}

// Manager is safe for concurrent use.
type Manager struct {
	cfg     Config
	store   Store
	runners Runners

	wake    chan struct{} // of size 1
	mu      sync.Mutex    // guards waiting
	waiting []core.CheckpointID
}

// New makes a manager.
func New(cfg Config, store Store, runners Runners) *Manager {
	return &Manager{cfg: cfg, store: store, runners: runners, wake: make(chan struct{}, 1)}
}

// Set replaces what is asked for of a checkpoint. A count of 0 ends it.
func (m *Manager) Set(ctx context.Context, project core.ProjectID, id core.CheckpointID, w Wanted) (State, error) {
	var out State
	err := m.store.InProject(ctx, project, func(tx Tx) (err error) {
		out, err = w.set(ctx, tx, project, id)
		return err
	})
	if err == nil {
		m.Soon(id)
	}
	return out, err
}

// Get returns what is known of the machines of a checkpoint.
func (m *Manager) Get(ctx context.Context, project core.ProjectID, id core.CheckpointID) (State, error) {
	var out State
	err := m.store.InProject(ctx, project, func(tx Tx) (err error) {
		if _, err = tx.Checkpoint(ctx, id); err != nil {
			return err
		}
		out, err = tx.Prepared(ctx, id)
		return err
	})
	return out, err
}

// SoonIf is Soon if yes.
func (m *Manager) SoonIf(yes bool, id core.CheckpointID) {
	if yes {
		m.Soon(id)
	}
}

// Soon sends what is asked for of a checkpoint to its runner at once, without waiting for it.
func (m *Manager) Soon(id core.CheckpointID) {
	m.mu.Lock()
	if len(m.waiting) < maxWaiting && !slices.Contains(m.waiting, id) {
		m.waiting = append(m.waiting, id)
	}
	m.mu.Unlock()
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// Run sends what Soon names until ctx ends.
func (m *Manager) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.wake:
		}
		m.mu.Lock()
		ids := m.waiting
		m.waiting = nil
		m.mu.Unlock()
		if len(ids) == 0 {
			continue
		}
		if _, err := m.send(ctx, ids, ""); err != nil && ctx.Err() == nil {
			m.cfg.Log.WarnContext(ctx, "prepared machines were not asked for at once", "err", err)
		}
	}
}

// Round ends asks and sends all others. Several controllers may do so at the same time.
func (m *Manager) Round(ctx context.Context) error {
	for ended := batch; ended == batch; {
		if err := m.store.InSystem(ctx, func(tx Tx) (err error) {
			ended, err = tx.EndPrepared(ctx, batch)
			return err
		}); err != nil {
			return err
		}
	}
	for after := core.CheckpointID(""); ; {
		list, err := m.send(ctx, nil, after)
		if err != nil || len(list) < batch {
			return err
		}
		after = list[len(list)-1].Checkpoint
	}
}

// send sends some asks, and notes what the runners answer. A runner that cannot be reached gets them in the next round.
func (m *Manager) send(ctx context.Context, ids []core.CheckpointID, after core.CheckpointID) (list []Ask, err error) {
	err = m.store.InSystem(ctx, func(tx Tx) (err error) {
		list, err = tx.PreparedAsks(ctx, ids, after, batch)
		return err
	})
	if err != nil || len(list) == 0 {
		return list, err
	}
	byRunner := map[string][]Ask{}
	for _, a := range list {
		if a.Endpoint != "" {
			byRunner[a.Endpoint] = append(byRunner[a.Endpoint], a)
		}
	}
	var (
		mu      sync.Mutex // guards reports
		reports []Report
		group   sync.WaitGroup
		places  = make(chan struct{}, maxCalls)
	)
	for endpoint, asks := range byRunner {
		places <- struct{}{}
		group.Go(func() {
			defer func() { <-places }()
			got, err := m.ask(ctx, endpoint, asks)
			if err != nil {
				m.cfg.Log.DebugContext(ctx, "a runner was not asked for prepared machines", "runner_id", asks[0].RunnerID, "err", err)
				return
			}
			mu.Lock()
			reports = append(reports, got...)
			mu.Unlock()
		})
	}
	group.Wait()
	if len(reports) == 0 {
		return list, context.Cause(ctx)
	}
	slices.SortFunc(reports, func(a, b Report) int { return compare(a.Checkpoint, b.Checkpoint) }) // rows are locked in one order
	return list, m.store.InSystem(ctx, func(tx Tx) error { return tx.NotePrepared(ctx, reports) })
}

func compare(a, b core.CheckpointID) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// ask calls one runner.
func (m *Manager) ask(ctx context.Context, endpoint string, asks []Ask) ([]Report, error) {
	authorities := map[core.ProjectID]string{}
	in := runnerapi.Prepare{Asks: make([]runnerapi.PrepareAsk, len(asks))}
	for i, a := range asks {
		one := runnerapi.PrepareAsk{CheckpointID: a.Checkpoint, Count: a.Count, Version: a.Version, Moves: a.Moves, ForSeconds: min(a.Left, lease).Seconds()}
		if a.Egress == core.EgressDenyAll && a.Count > 0 { // as a fork says it to the runner
			ca, known := authorities[a.Project]
			if !known {
				var err error
				if ca, err = m.cfg.Authority(ctx, a.Project); err != nil {
					return nil, err
				}
				authorities[a.Project] = ca
			}
			one.CA = ca
		}
		in.Asks[i] = one
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	out, err := m.runners.Prepare(ctx, endpoint, in)
	if err != nil {
		return nil, err
	}
	if len(out.Asks) != len(asks) {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "the runner answered %d asks with %d states", len(asks), len(out.Asks))
	}
	reports := make([]Report, len(asks))
	for i, a := range asks {
		reports[i] = Report{Checkpoint: a.Checkpoint, Moves: a.Moves, Max: out.Max, PreparedState: bounded(out.Asks[i])}
	}
	return reports, nil
}

// bounded keeps what a runner says within what can be true. A runner may have been taken over.
func bounded(s runnerapi.PreparedState) runnerapi.PreparedState {
	const most = 1 << 40
	whole := func(n *int64) { *n = min(max(*n, 0), most) }
	part := func(f *float64) {
		if !(*f >= 0 && *f <= most) { // also not a number
			*f = 0
		}
	}
	s.Instance = core.Clip(s.Instance)
	s.Ready = min(max(s.Ready, 0), MaxProject)
	whole(&s.MemoryBytes)
	for _, n := range []*int64{&s.Hits, &s.Misses, &s.Wasted} {
		whole(n)
	}
	part(&s.TakenCPUSeconds)
	part(&s.WastedCPUSeconds)
	return s
}
