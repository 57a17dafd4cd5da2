package fleet

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
)

// RunnerSandbox is a living sandbox of a runner, with the fields that a heartbeat needs.
type RunnerSandbox struct {
	ID          core.SandboxID
	WorkspaceID core.WorkspaceID
	State       core.WorkspaceState
	Current     bool      // the workspace's present one, neither one that a restore prepares nor one that is being suspended
	Settled     bool      // ready since before the moment that SandboxFilter has
	Stalled     time.Time // since when it waits for the store; zero: it does not
}

// Order says how a heartbeat follows those that were applied before.
type Order struct {
	// Next says that the last applied heartbeat is the last one whose answer the runner got, so nothing was lost in between.
	Next bool
	// Settled is a moment before the runner collected the heartbeat, by the database's clock: what was ready then is in it. It is
	// zero when no such moment is known.
	Settled time.Time
	// ImagesSum is the checksum of the list of images that was recorded last.
	ImagesSum string
	Endpoint  string
	// Removed are the runners that were removed lately, the latest first.
	Removed []core.RunnerID
	// Holds says that the runner holds checkpoints in the store. It was read before the heartbeat waited for its turn, so it may be out of date.
	Holds bool
	// Draining says that nothing new is placed on the runner.
	Draining bool
}

// Terms are what a heartbeat asks for.
type Terms struct {
	Lease         time.Duration
	RemovedWithin time.Duration // how long ago the removed runners were removed
}

// SandboxFilter says which sandboxes of a runner are of interest.
type SandboxFilter struct {
	Settled time.Time // see RunnerSandbox
	All     bool
	// Without All: these sandboxes, and those of these workspaces.
	Sandboxes  []core.SandboxID
	Workspaces []core.WorkspaceID
}

// RunnerCheckpoints are checkpoints that a runner has. One that is in no list has no row, or the runner should not have its
// bytes: its capture failed, or it was captured elsewhere and is not in the store.
type RunnerCheckpoints struct {
	Copies    []core.CheckpointID // captured there, or sealed
	Capturing []core.CheckpointID
	Deleted   []core.CheckpointID
}

// BeatTx applies registrations and heartbeats.
type BeatTx interface {
	RegisterRunner(ctx context.Context, r runnerapi.Register, ttl time.Duration) (model.Runner, error)
	// HeartbeatRunner extends the lease. RUNNER_LOST when it was given up; STATE_CONFLICT and RUNNER_NOT_FOUND when the runner
	// must register again; HEARTBEAT_STALE when a later heartbeat was applied before.
	HeartbeatRunner(ctx context.Context, id core.RunnerID, h runnerapi.Heartbeat, terms Terms) (Order, error)
	// HeartbeatQuietRunners extends the leases of different runners, and returns those that it has extended. It skips a heartbeat that HeartbeatRunner would
	// refuse, that is not the next after the last applied one, or that changes anything but the lease and the load. It also skips a runner that holds
	// checkpoints in the store, or whose row is locked.
	HeartbeatQuietRunners(ctx context.Context, list []QuietBeat, terms Terms) (map[core.RunnerID]Order, error)
	// RunnerSandboxes lists the sandboxes that should be on the runner, or some of them.
	RunnerSandboxes(ctx context.Context, id core.RunnerID, which SandboxFilter) ([]RunnerSandbox, error)
	// SetStalls records that sandboxes of the runner stand still, or, with a zero stall, that they no longer do.
	SetStalls(ctx context.Context, id core.RunnerID, list map[core.SandboxID]model.Stall) error
	// HeldCheckpoints sorts checkpoints that the runner says it has.
	HeldCheckpoints(ctx context.Context, id core.RunnerID, ids []core.CheckpointID) (RunnerCheckpoints, error)
	// SetCopies records that the runner has exactly these checkpoints. ChangeCopies records that some were added and some are gone. Only
	// captured and sealed checkpoints are recorded.
	SetCopies(ctx context.Context, id core.RunnerID, ids []core.CheckpointID) error
	ChangeCopies(ctx context.Context, id core.RunnerID, come, gone []core.CheckpointID) error
	// HeldSums returns the checksums of the runner's living sandboxes and of its copies of checkpoints, without some given ones.
	HeldSums(ctx context.Context, id core.RunnerID, but []core.CheckpointID) (sandboxes, checkpoints int64, err error)
	// SetHolds replaces the checkpoints that a runner holds in the store, because it fetches them. It ignores checkpoints that were deleted
	// before they were held.
	SetHolds(ctx context.Context, runner core.RunnerID, fetching []core.CheckpointID) error
	// InsertUsage records what sandboxes of the runner have used since their start.
	InsertUsage(ctx context.Context, runner core.RunnerID, list []runnerapi.Usage) error
	// InsertDataWrites records writes to files by a runner's data plane. It leaves out writes to sandboxes of other runners, and
	// writes whose numbers in the runner's log were recorded before.
	InsertDataWrites(ctx context.Context, runner core.RunnerID, log string, list []runnerapi.DataWrite) error
	// EndedKeys returns those of the given keys that are revoked or have expired.
	EndedKeys(ctx context.Context, ids []core.KeyID) ([]core.KeyID, error)
	// EndWorkspaces ends workspaces and all their sandboxes. Its answer does not name the checkpoints from which lost ones can be recovered.
	EndWorkspaces(ctx context.Context, list []model.EndedWorkspace) ([]model.Workspace, error)
}

// Heartbeat extends a lease and compares what runs with the rows. Living rows exist before a runner is called, so a sandbox without
// one is garbage. A settled workspace whose sandbox is dead or missing is LOST.
func (f *Fleet) Heartbeat(ctx context.Context, id core.RunnerID, h runnerapi.Heartbeat) (runnerapi.Heartbeated, error) {
	return f.apply(ctx, &beat{fleet: f, id: id, h: h})
}

// Beat is Heartbeat with differences.
func (f *Fleet) Beat(ctx context.Context, id core.RunnerID, b runnerapi.Beat) (runnerapi.Heartbeated, error) {
	return f.apply(ctx, &beat{fleet: f, id: id, h: b.Heartbeat, differences: &b})
}

// beat is a heartbeat that is being applied.
type beat struct {
	fleet       *Fleet
	id          core.RunnerID
	h           runnerapi.Heartbeat
	differences *runnerapi.Beat // nil: h names everything that the runner has
	reported    map[core.SandboxID]runnerapi.Sandbox
	usage       []runnerapi.Usage // usage that must be written now
	dropping    bool              // the runner did not drop something that it was asked to

	// The results of a transaction.
	out   runnerapi.Heartbeated
	order Order
	lost  []model.EndedWorkspace
	here  map[core.WorkspaceID]bool // of the workspaces that were looked up, those on the runner
}

func (f *Fleet) apply(ctx context.Context, b *beat) (runnerapi.Heartbeated, error) {
	ctx = request.WithOrigin(ctx, request.Origin{Actor: string(b.id), Action: "heartbeat"})
	if err := checkBeat(b.h, b.differences); err != nil {
		return runnerapi.Heartbeated{}, err
	}
	b.h.DataLog, b.h.DataWrites = cleanText(b.h.DataLog, 64), cleanWrites(b.h.DataWrites)
	b.reported = make(map[core.SandboxID]runnerapi.Sandbox, len(b.h.Sandboxes))
	for _, s := range b.h.Sandboxes {
		b.reported[s.ID] = s
	}
	b.usage = f.usage.due(b.h.Usage, f.cfg.UsageInterval)
	_, b.dropping = f.dropping.LoadAndDelete(b.id)
	if err := f.write(ctx, b); err != nil {
		if b.dropping {
			f.dropping.Store(b.id, true)
		}
		return runnerapi.Heartbeated{}, err
	}
	for _, w := range b.h.DataUsed { // a runner's reports about other sandboxes are ignored
		if b.here[w] {
			f.cfg.Used(w)
		}
	}
	f.usage.written(b.usage, f.cfg.UsageInterval)
	for _, l := range b.lost {
		f.cfg.Log.WarnContext(ctx, "workspace lost", "workspace_id", l.ID, "runner_id", b.id, "cause", l.Failure.Message)
	}
	if out := b.out; len(out.DropSandboxes)+len(out.DropCheckpoints)+len(out.StrayCheckpoints) > 0 {
		f.cfg.Log.InfoContext(ctx, "runner was asked to drop what has no row", "runner_id", b.id,
			"sandboxes", out.DropSandboxes, "checkpoints", out.DropCheckpoints, "strays", out.StrayCheckpoints)
	}
	if sum := b.h.Info.Images; sum != "" && sum != b.order.ImagesSum {
		f.refreshImages(b.id, b.order.Endpoint)
	}
	b.out.AttestationCertificate = f.certify(ctx, b.id, b.h.AttestationRequest) // the transaction has found its lease
	return b.out, nil
}

// write applies a heartbeat to the rows.
func (f *Fleet) write(ctx context.Context, b *beat) error {
	if b.quiet() {
		if applied, err := f.applyQuietly(ctx, b); applied || err != nil {
			return err
		}
	}
	return f.store.InSystem(ctx, func(tx Tx) error { return b.write(ctx, tx) })
}

// terms are what each heartbeat asks for.
func (f *Fleet) terms() Terms {
	return Terms{Lease: f.cfg.Lease, RemovedWithin: f.cfg.CertificateLife + time.Hour}
}

// begin starts the results of a heartbeat that counts.
func (b *beat) begin(order Order) {
	b.out = runnerapi.Heartbeated{
		Number: b.h.Number, TTLSeconds: b.fleet.cfg.Lease.Seconds(), FenceSeconds: b.fleet.fenceTime().Seconds(), DataTaken: len(b.h.DataWrites), RemovedRunners: order.Removed,
		Draining: order.Draining,
	}
	b.order, b.lost, b.here = order, nil, make(map[core.WorkspaceID]bool)
}

// write does everything in one transaction. The first statement decides whether the heartbeat counts, and changes the runner's row. A heartbeat
// without news needs nothing else (docs/SCALE.md).
func (b *beat) write(ctx context.Context, tx BeatTx) error {
	order, err := tx.HeartbeatRunner(ctx, b.id, b.h, b.fleet.terms())
	if err != nil {
		return err
	}
	b.begin(order)
	if b.out.EndedKeys, err = endedKeys(ctx, tx, b.h.DataKeys); err != nil {
		return err
	}
	if err := tx.InsertDataWrites(ctx, b.id, b.h.DataLog, b.h.DataWrites); err != nil {
		return err
	}
	if len(b.h.Fetching) > 0 || order.Holds {
		if err := tx.SetHolds(ctx, b.id, b.h.Fetching[:min(len(b.h.Fetching), maxHolds)]); err != nil {
			return err
		}
	}
	if err := tx.InsertUsage(ctx, b.id, b.usage); err != nil {
		return err
	}
	if b.differences != nil && !order.Next { // they are differences to a state that is not in the rows
		b.out.AllSandboxes, b.out.AllCheckpoints = true, true
		return nil
	}
	if err := b.sandboxes(ctx, tx, order.Settled); err != nil {
		return err
	}
	if err := b.checkpoints(ctx, tx); err != nil {
		return err
	}
	if len(b.lost) > 0 {
		if _, err := tx.EndWorkspaces(ctx, b.lost); err != nil {
			return err
		}
	}
	return b.compareSums(ctx, tx)
}

// sandboxes compares the reported sandboxes with the rows.
func (b *beat) sandboxes(ctx context.Context, tx BeatTx, settled time.Time) error {
	which := SandboxFilter{Settled: settled, All: b.differences == nil || b.differences.AllSandboxes}
	if !which.All {
		for id := range b.reported {
			which.Sandboxes = append(which.Sandboxes, id)
		}
		which.Workspaces = b.h.DataUsed
	}
	rows, err := tx.RunnerSandboxes(ctx, b.id, which)
	if err != nil {
		return err
	}
	expected, stalls := make(map[core.SandboxID]bool, len(rows)), make(map[core.SandboxID]model.Stall)
	for _, row := range rows {
		expected[row.ID] = true
		b.here[row.WorkspaceID] = true
		s, there := b.reported[row.ID]
		if !there && !which.All {
			continue // it is as it was
		}
		if stall := stallOf(s); !stall.Since.Equal(row.Stalled) {
			stalls[row.ID] = stall
		}
		if why := lostBecause(row, s, there); why != "" {
			b.lost = append(b.lost, model.EndedWorkspace{ID: row.WorkspaceID, To: core.WorkspaceLost, Sandbox: row.ID, Failure: &model.Failure{Code: core.CodeSandboxLost, Message: why}})
		}
	}
	for _, s := range b.h.Sandboxes {
		if !expected[s.ID] && s.State != runnerapi.SandboxDead {
			b.out.DropSandboxes = append(b.out.DropSandboxes, s.ID)
		}
	}
	return tx.SetStalls(ctx, b.id, stalls)
}

// checkpoints records which checkpoints the runner has, and finds those that it should not have.
func (b *beat) checkpoints(ctx context.Context, tx BeatTx) error {
	has, err := tx.HeldCheckpoints(ctx, b.id, b.h.Checkpoints)
	if err != nil {
		return err
	}
	known := append(has.Copies, has.Capturing...) // a checkpoint that was captured meanwhile was also recorded meanwhile
	if b.differences == nil || b.differences.AllCheckpoints {
		err = tx.SetCopies(ctx, b.id, known)
	} else if len(known)+len(b.differences.GoneCheckpoints) > 0 {
		err = tx.ChangeCopies(ctx, b.id, known, b.differences.GoneCheckpoints)
	}
	b.out.Unsettled, b.out.DropCheckpoints = has.Capturing, has.Deleted
	sorted := make(map[core.CheckpointID]bool, len(known)+len(has.Deleted))
	for _, id := range append(known, has.Deleted...) {
		sorted[id] = true
	}
	for _, id := range b.h.Checkpoints {
		if !sorted[id] {
			b.out.StrayCheckpoints = append(b.out.StrayCheckpoints, id)
		}
	}
	return err
}

// SumEvery says how often an unchanged runner's checksums are compared with the rows: at one heartbeat in so many. They are also compared at
// the next heartbeat after this controller could not make the runner drop something. Failovers and lost answers are found without checksums:
// the number of the heartbeat is then not the next one.
const SumEvery = 6

// sumsDue says that a heartbeat without differences must be compared too.
func (b *beat) sumsDue() bool {
	return b.dropping || b.h.Number/SumEvery != b.h.Answered/SumEvery // by the number that was applied last, because a runner can skip numbers
}

// compareSums asks the runner for a whole list if the runner's checksum differs from that of the rows. A list that it has sent whole was
// compared already. The checksum of the copies takes 0.3 to 0.65 ms (docs/SCALE.md), so heartbeats without differences seldom
// compute it.
func (b *beat) compareSums(ctx context.Context, tx BeatTx) error {
	if b.differences == nil {
		return nil
	}
	if !b.sumsDue() && len(b.h.Sandboxes)+len(b.h.Checkpoints)+len(b.differences.GoneCheckpoints) == 0 {
		return nil
	}
	sandboxes, checkpoints, err := tx.HeldSums(ctx, b.id, b.h.Checkpoints)
	b.out.AllSandboxes = !b.differences.AllSandboxes && sandboxes != b.differences.SandboxSum
	b.out.AllCheckpoints = !b.differences.AllCheckpoints && checkpoints != b.differences.CheckpointSum
	return err
}

// checkBeat refuses impossible numbers of heartbeats.
func checkBeat(h runnerapi.Heartbeat, differences *runnerapi.Beat) error {
	if differences != nil && h.Number == 0 {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "number: a heartbeat with differences has a number")
	}
	const most = 1 << 53
	if h.Number < 0 || h.Number > most || h.Answered < 0 || h.Answered > 0 && h.Answered >= h.Number {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "number, answered: a heartbeat's numbers are positive, and it was collected after the one that was answered")
	}
	return nil
}

// maxHolds bounds what a runner says that it fetches.
const maxHolds = 10000

// endedKeys says which of the keys that a data plane reports are no longer valid.
func endedKeys(ctx context.Context, tx BeatTx, keys []core.KeyID) ([]core.KeyID, error) {
	const most = 4096 // of the keys that a runner reports
	if len(keys) == 0 {
		return nil, nil
	}
	return tx.EndedKeys(ctx, keys[:min(len(keys), most)])
}

// lostBecause says why a workspace is lost; it is empty if the workspace is not lost. If an operation moves the workspace into a sandbox
// or out of one, that operation decides instead.
func lostBecause(row RunnerSandbox, s runnerapi.Sandbox, there bool) string {
	if !row.Current || row.State != core.WorkspaceReady && row.State != core.WorkspaceCheckpointing {
		return ""
	}
	switch {
	case there && s.State == runnerapi.SandboxDead:
		if s.Exit != "" { // the runner may have ended it
			return core.ClipExit(s.Exit)
		}
		return "its virtual machine ended by itself"
	case !there && row.Settled:
		return "its runner has no sandbox " + string(row.ID) + " any more"
	}
	return ""
}

// stallOf is a runner's report of a sandbox that stands still.
func stallOf(s runnerapi.Sandbox) model.Stall {
	if s.Stalled == nil || s.State == runnerapi.SandboxDead {
		return model.Stall{}
	}
	p := s.Stalled.Problem
	return model.Stall{Since: s.Stalled.Since.Truncate(time.Microsecond), Code: core.Code(core.Clip(string(p.Code))), Message: core.ClipTail(p.Message)} // as the database keeps times
}
