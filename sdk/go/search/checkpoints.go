package search

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"sync"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Key is the annotation that holds the record of a node. Its version changes with the format.
const Key = "coppice.search/v1"

// Annotations beside the record, for people and for retention policies: numbers of the search that wrote last.
const (
	KeyScore  = "score"  // the node's own value
	KeyMean   = "mean"   // the mean value of the node and all below it
	KeyVisits = "visits" // how many values that are
)

// Checkpoints is a Store whose nodes are checkpoints, and whose records are their annotations.
type Checkpoints struct {
	Client *coppice.Client
	// Name tells the search from others over the same checkpoints, in at most 64 bytes; it becomes part of the annotation's key. Searches
	// by UCT and PUCT may go on under the same name; BestOfN and Beam need a name of their own, as they leave out actions.
	Name string
}

func (c Checkpoints) key() string {
	if c.Name == "" {
		return Key
	}
	return Key + "/" + c.Name
}

// Annotations returns the annotations of a new child, to be given to the call that makes its checkpoint.
func (c Checkpoints) Annotations(action string, o Outcome) (coppice.Annotations, error) {
	r := Record{Action: action, Value: &o.Value, Terminal: o.Terminal, Data: o.Data}
	r.count()
	return c.annotations(r)
}

func (c Checkpoints) annotations(r Record) (coppice.Annotations, error) {
	if len(c.Name) > maxSearches {
		return nil, fmt.Errorf("the name of the search has %d bytes; at most %d are possible", len(c.Name), maxSearches)
	}
	b, err := r.encode()
	if err != nil {
		return nil, err
	}
	out := coppice.Annotations{c.key(): json.RawMessage(b), KeyMean: r.mean(), KeyVisits: r.Visits}
	if r.Value != nil {
		out[KeyScore] = *r.Value
	}
	return out, nil
}

// Load reads a checkpoint's record.
func (c Checkpoints) Load(ctx context.Context, id string) (Record, int64, error) {
	cp, err := c.Client.Checkpoint(ctx, id)
	if err != nil {
		return Record{}, 0, c.gone(ctx, id, err)
	}
	if cp.State == coppice.CheckpointDeleted || cp.State == coppice.CheckpointFailed {
		return Record{}, 0, fmt.Errorf("%w: checkpoint %s is %s", ErrGone, id, cp.State)
	}
	r, _, err := c.record(cp)
	return r, cp.Version, err
}

// Save writes a checkpoint's record if the checkpoint has this version still.
func (c Checkpoints) Save(ctx context.Context, id string, version int64, r Record) (int64, error) {
	annotations, err := c.annotations(r)
	if err != nil {
		return 0, err
	}
	cp, err := c.Client.PatchCheckpoint(ctx, id, coppice.PatchCheckpointRequest{Version: version, Annotations: annotations})
	if errors.Is(err, coppice.CodeVersionConflict) {
		return 0, ErrConflict
	}
	return cp.Version, c.gone(ctx, id, err)
}

// Children reads the records of a checkpoint's children. It waits for those that are being captured when it begins: their searcher has done their
// actions.
func (c Checkpoints) Children(ctx context.Context, id string) (map[string]Record, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, captureTime, fmt.Errorf("a child was not captured within %s", captureTime))
	defer cancel()
	out, first, err := c.children(ctx, id)
	for err == nil && len(first) > 0 {
		if !pause(ctx, capturePause) {
			return nil, context.Cause(ctx)
		}
		var now map[string]bool
		if out, now, err = c.children(ctx, id); err == nil {
			maps.DeleteFunc(first, func(child string, _ bool) bool { return !now[child] })
		}
	}
	return out, err
}

// children also returns which children with a record are being captured.
func (c Checkpoints) children(ctx context.Context, id string) (out map[string]Record, capturing map[string]bool, err error) {
	out, capturing = map[string]Record{}, map[string]bool{}
	for cp, err := range c.Client.Checkpoints(ctx, coppice.CheckpointFilter{
		ParentID: id, States: []coppice.CheckpointState{coppice.CheckpointCapturing, coppice.CheckpointCaptured, coppice.CheckpointSealed},
	}) {
		if err != nil {
			return nil, nil, c.gone(ctx, id, err)
		}
		r, ok, err := c.record(cp)
		switch {
		case err != nil:
			return nil, nil, err
		case ok && cp.State == coppice.CheckpointCapturing:
			capturing[cp.ID] = true
		case ok:
			out[cp.ID] = r
		}
	}
	return out, capturing, nil
}

func (c Checkpoints) record(cp coppice.Checkpoint) (Record, bool, error) {
	found, ok := cp.Annotations[c.key()]
	if !ok {
		return Record{}, false, nil
	}
	b, err := json.Marshal(found)
	if err != nil {
		return Record{}, false, err
	}
	r, err := decode(b)
	if err != nil {
		return Record{}, false, fmt.Errorf("annotation %s of checkpoint %s: %w; remove it, or search under another name", c.key(), cp.ID, err)
	}
	return r, true, nil
}

// gone makes ErrGone of an error that says that a checkpoint is no more.
func (c Checkpoints) gone(ctx context.Context, id string, err error) error {
	if errors.Is(err, coppice.CodeCheckpointNotFound) {
		return fmt.Errorf("%w: %w", ErrGone, err)
	}
	if errors.Is(err, coppice.CodeStateConflict) { // also that of a deleted checkpoint
		if _, _, now := c.Load(ctx, id); errors.Is(now, ErrGone) {
			return now
		}
	}
	return err
}

// Forks is a Problem, and the Store for it, whose expansions are forks of checkpoints: it forks a node once for each action, has Act do
// the action in the fork, records the result as a new checkpoint, and terminates the fork.
type Forks struct {
	Checkpoints
	// Propose is Problem.Actions.
	Propose func(ctx context.Context, n *Node) ([]Action, error)
	// Act does an action in a fork. An Outcome with a Reason gets no checkpoint; Child is set for the others. Actions of one expansion
	// are done at the same time.
	Act func(ctx context.Context, ws coppice.Workspace, a Action) (Outcome, error)
	// Fork has further options of the forks, such as labels, which the checkpoints get as well, or what they may reach. Count is
	// set. Without TTLSeconds they live for an hour, so that a searcher that crashes leaves none behind.
	Fork coppice.ForkCheckpointRequest
}

const (
	forkTTL = 3600 // seconds that a fork lives that nobody terminates
	// How long an expansion waits, after its context has ended, for a capture that is under way, and then for the end of the fork. margin has room for both.
	endTime = 4 * time.Second
	// How long, and how often, a searcher looks at a child that is being captured.
	captureTime  = time.Minute
	capturePause = 200 * time.Millisecond
)

// Actions proposes what can be tried at a node.
func (f *Forks) Actions(ctx context.Context, n *Node) ([]Action, error) { return f.Propose(ctx, n) }

// Expand forks a node and does the actions.
func (f *Forks) Expand(ctx context.Context, n *Node, actions []Action) ([]Outcome, error) {
	req := f.Fork
	req.Count = new(len(actions))
	if req.TTLSeconds == 0 {
		req.TTLSeconds = forkTTL
	}
	fork, err := f.Client.ForkCheckpoint(ctx, n.ID, req)
	if err != nil {
		return nil, errors.Join(f.gone(ctx, n.ID, err), f.abandon(ctx, err))
	}
	out := make([]Outcome, len(actions))
	var forks sync.WaitGroup
	for i := range actions {
		if i >= len(fork.Children) || fork.Children[i].Workspace == nil || fork.Children[i].Problem != nil {
			out[i].Err = failure(fork, i)
			continue
		}
		forks.Go(func() { out[i] = f.try(ctx, *fork.Children[i].Workspace, actions[i]) })
	}
	forks.Wait()
	return out, nil
}

// failure says why a child of a fork is not there.
func failure(fork coppice.ForkResult, i int) error {
	if i < len(fork.Children) && fork.Children[i].Problem != nil {
		return fork.Children[i].Problem.Err()
	}
	return fmt.Errorf("operation %s made no child for it", fork.OperationID)
}

// try does one action in its fork, and terminates the fork. Should that fail, its time to live ends it.
func (f *Forks) try(ctx context.Context, ws coppice.Workspace, a Action) Outcome {
	defer func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTime)
		defer cancel()
		_, _ = f.Client.TerminateWorkspace(ending, ws.ID)
	}()
	o, err := f.Act(ctx, ws, a)
	if o.Child = ""; err != nil {
		return Outcome{Err: err}
	}
	if o.Err != nil || o.Reason != "" {
		return o
	}
	annotations, err := f.Annotations(a.Name, o)
	if err != nil {
		return Outcome{Err: err}
	}
	cp, err := f.Client.CreateCheckpoint(ctx, ws.ID, coppice.CreateCheckpointRequest{Labels: f.Fork.Labels, Annotations: annotations})
	if unfinished, ok := errors.AsType[*coppice.UnfinishedError](err); ok {
		cp, err = f.captured(ctx, unfinished)
	}
	if err != nil {
		refusal, refused := errors.AsType[*coppice.Error](err)
		refused = refused && refusal.Status < http.StatusInternalServerError
		return Outcome{Err: fmt.Errorf("checkpoint workspace %s: %w", ws.ID, err), unknown: !refused}
	}
	o.Child = cp.ID
	return o
}

// captured waits a little longer for a checkpoint that is being made. Without its id the child could not be written down, and its action would be
// tried again.
func (f *Forks) captured(ctx context.Context, unfinished *coppice.UnfinishedError) (cp coppice.Checkpoint, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTime)
	defer cancel()
	op, err := f.Client.WaitOperation(ctx, unfinished.OperationID)
	switch {
	case err != nil:
		return cp, errors.Join(unfinished, err)
	case op.State == coppice.OperationFailed && op.Problem != nil:
		return cp, &coppice.Error{Code: coppice.Code(op.Problem.Code), Detail: op.Problem.Message, OperationID: op.ID}
	case op.State != coppice.OperationSucceeded:
		return cp, unfinished
	}
	return cp, json.Unmarshal(op.Result, &cp)
}

// abandon ends a fork that is no longer waited for, and terminates what it has made.
func (f *Forks) abandon(ctx context.Context, cause error) error {
	unfinished, ok := errors.AsType[*coppice.UnfinishedError](cause)
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTime)
	defer cancel()
	op, err := f.Client.CancelOperation(ctx, unfinished.OperationID)
	if err != nil || op.State != coppice.OperationSucceeded {
		return err
	}
	var fork coppice.ForkResult
	if err := json.Unmarshal(op.Result, &fork); err != nil {
		return err
	}
	errs := make([]error, len(fork.Children))
	var ends sync.WaitGroup
	for i, child := range fork.Children {
		if child.Workspace != nil {
			ends.Go(func() { _, errs[i] = f.Client.TerminateWorkspace(ctx, child.Workspace.ID) })
		}
	}
	ends.Wait()
	return errors.Join(errs...)
}
