package storecheck

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"slices"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// Data is the result of one request that reads a part of the stored data.
type Data struct {
	Checkpoints int   // that were checked completely
	Remaining   int   // that were not checked yet
	Frames      int64 // that were read
	Bytes       int64 // of them
	Problems    []Problem
	Next        string // where the next request continues; empty at the end
}

// Problem is an object that differs from what was stored, or is missing.
type Problem struct {
	Object      string
	Code        core.Code
	Message     string
	Checkpoints []core.CheckpointID // the first checkpoints that need it
	Needed      int                 // how many checkpoints need it
}

// The bounds of a request.
const (
	storeDataTime  = 5 * time.Second
	storeDataBatch = 16 // checkpoints between two looks at the rows
	// MaxParts is the largest number of parts into which the stored data can be divided.
	MaxParts = 1_000_000
	// maxNeeders bounds the checkpoints that a problem names.
	maxNeeders = 20
)

// dataCursor says where a request continues.
type dataCursor struct {
	Checkpoint core.CheckpointID `json:"c"` // the last one that was checked
	snapshotstore.Position
}

// dataCheck keeps what the last request has seen, for the next one. Without it (after a restart, or on another controller) frames of
// several checkpoints are read more than once.
type dataCheck struct {
	mu      sync.Mutex // guards what follows
	next    string
	part    snapshotstore.Part
	checker *keyedChecker
}

// keyedChecker is a checker that gets further keys while it works.
type keyedChecker struct {
	*snapshotstore.Checker
	keys *envelope.Ring
}

func (d *dataCheck) take(next string, part snapshotstore.Part) *keyedChecker {
	d.mu.Lock()
	defer d.mu.Unlock()
	if next == "" || d.next != next || d.part != part {
		return nil
	}
	c := d.checker
	d.next, d.checker = "", nil
	return c
}

func (d *dataCheck) keep(next string, part snapshotstore.Part, c *keyedChecker) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.next, d.part, d.checker = next, part, c
}

// CheckStoreData reads and verifies sealed checkpoints for a few seconds: every manifest, and the
// frames of one part. next comes from the previous answer; it is empty at the beginning. Objects
// that are deleted meanwhile are no problem.
func (c *Checker) CheckStoreData(ctx context.Context, part snapshotstore.Part, next string) (Data, error) {
	var out Data
	if c.blobs == nil {
		return out, model.ErrNoStore
	}
	if part.Which < 1 || part.Which > part.Of || part.Of > MaxParts {
		return out, core.Errorf(core.Invalid, core.CodeInvalidField, "part: it must be from 1 to of, which is at most %d", MaxParts)
	}
	at, err := parseDataCursor(next)
	if err != nil {
		return out, err
	}
	checker := c.data.take(next, part)
	if checker == nil {
		keys := new(envelope.Ring)
		checker = &keyedChecker{snapshotstore.NewChecker(envelope.With(c.blobs, keys), part), keys}
	}
	frames, bytes := checker.Frames, checker.Bytes
	until := time.Now().Add(storeDataTime)
	var faults []snapshotstore.Fault
	for done := false; !done && time.Now().Before(until) && len(faults) < maxStoreDetails; {
		var found []snapshotstore.Fault
		var n int
		found, n, done, err = c.checkSome(ctx, checker, &at, until)
		if err != nil {
			return out, err
		}
		faults, out.Checkpoints = append(faults, found...), out.Checkpoints+n
		if done {
			at = dataCursor{}
		}
	}
	out.Frames, out.Bytes = checker.Frames-frames, checker.Bytes-bytes
	if out.Problems, err = c.problems(ctx, faults); err != nil || at == (dataCursor{}) {
		return out, err
	}
	out.Next = at.String()
	c.data.keep(out.Next, part, checker)
	out.Remaining, err = inSystem(ctx, c.store, func(tx Tx) (int, error) { return tx.CountSealed(ctx, at.Checkpoint) })
	if at.Position != (snapshotstore.Position{}) {
		out.Remaining++
	}
	return out, err
}

// checkSome checks the next checkpoints. It returns how many it has finished, and whether they were the last.
func (c *Checker) checkSome(ctx context.Context, checker *keyedChecker, at *dataCursor, until time.Time) (faults []snapshotstore.Fault, n int, done bool, err error) {
	within := at.Position != (snapshotstore.Position{})
	list, err := inSystem(ctx, c.store, func(tx Tx) ([]runnerapi.Stored, error) {
		return tx.SealedAfter(ctx, at.Checkpoint, within, storeDataBatch)
	})
	if err != nil {
		return nil, 0, false, err
	}
	for _, s := range list {
		from := snapshotstore.Position{}
		if s.CheckpointID == at.Checkpoint {
			from = at.Position
		}
		var found []snapshotstore.Fault
		var next *snapshotstore.Position
		keys, err := c.keys(ctx, s)
		if err == nil {
			checker.keys.Add(keys)
			found, next, err = checker.CheckFrom(ctx, manifest.Ref{Key: s.Manifest, Digest: s.Digest, Bytes: s.Bytes}, from, until)
		}
		if core.CodeOf(err) == core.CodeKeyUnavailable { // this checkpoint cannot be checked, but others can
			found, err = []snapshotstore.Fault{{Object: s.Manifest, Err: err}}, nil
		}
		if err != nil {
			return nil, 0, false, err
		}
		faults = append(faults, found...)
		*at = dataCursor{Checkpoint: s.CheckpointID}
		if next != nil {
			at.Position = *next
			return faults, n, false, nil
		}
		n++
		if time.Now().After(until) {
			return faults, n, false, nil
		}
	}
	return faults, n, len(list) < storeDataBatch, nil
}

// problems are the faults of needed objects, each once, with the checkpoints that need the object.
func (c *Checker) problems(ctx context.Context, faults []snapshotstore.Fault) ([]Problem, error) {
	if len(faults) == 0 {
		return nil, nil
	}
	var keys []string
	for _, f := range faults {
		keys = append(keys, f.Object)
	}
	needs, err := inSystem(ctx, c.store, func(tx Tx) (map[string][]core.CheckpointID, error) { return tx.NeededBy(ctx, keys) })
	var out []Problem
	for _, f := range faults {
		by := needs[f.Object]
		code := core.CodeOf(f.Err)
		if len(by) == 0 || slices.ContainsFunc(out, func(p Problem) bool { return p.Object == f.Object && p.Code == code }) {
			continue
		}
		out = append(out, Problem{Object: f.Object, Code: code, Message: core.MessageOf(f.Err), Checkpoints: by[:min(len(by), maxNeeders)], Needed: len(by)})
	}
	return out, err
}

func (d dataCursor) String() string {
	b, _ := json.Marshal(d) // of strings and a number
	return base64.RawURLEncoding.EncodeToString(b)
}

func parseDataCursor(s string) (d dataCursor, err error) {
	if s == "" {
		return d, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err == nil {
		err = json.Unmarshal(b, &d)
	}
	if err == nil {
		_, err = core.ParseID[core.CheckpointID](string(d.Checkpoint))
	}
	if err != nil {
		return d, core.Wrapf(err, core.Invalid, core.CodeInvalidField, "after: it is not the next of an earlier answer")
	}
	return d, nil
}
