package search

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
)

// Bounds of what a search keeps with a node. A checkpoint has room for 16 KiB of annotations, of which others may need some.
const (
	// MaxRecord bounds a Record as JSON, in bytes.
	MaxRecord = 12 << 10
	// MaxSearchers bounds the searchers that are named in one record.
	MaxSearchers = 32
	// MaxReason bounds the reason of an action that led to no node, in bytes of JSON. The rest is cut.
	MaxReason = 160

	maxName     = 128 // bytes of the name of an action or of a searcher
	maxSearches = 64  // bytes of the name of a search
	earlier     = "-"
	// What an edge needs besides its action when it has been tried: the id of its child and numbers, or a reason.
	triedBytes = 200
)

// Action is something that can be tried at a node.
type Action struct {
	// Name tells the action from the others of the node, in at most 128 bytes.
	Name string `json:"action"`
	// Prior is P(s, a) up to a factor: PUCT divides it by the sum over the node's actions. If all are 0, all are equal.
	Prior float64 `json:"prior,omitempty"`
	// Data is what the problem needs to do it.
	Data json.RawMessage `json:"data,omitempty"`
}

// Edge is an action of a node, with the statistics of the subtree that it led to.
type Edge struct {
	Action
	// Child is the node that the action led to; empty if it has not been tried, or led to none.
	Child string `json:"child,omitempty"`
	// Value is the child's own value.
	Value float64 `json:"value,omitempty"`
	// Visits is N(s, a): how many values are known of the child and below it.
	Visits int64 `json:"visits,omitempty"`
	// ValueSum is W(s, a): the sum of these values. Q(s, a) is ValueSum / Visits.
	ValueSum float64 `json:"value_sum,omitempty"`
	// Min and Max are the least and the greatest of these values.
	Min float64 `json:"min,omitempty"`
	Max float64 `json:"max,omitempty"`
	// Done says that nothing is left to be tried on this way.
	Done bool `json:"done,omitempty"`
	// Reason says why the action led to no node.
	Reason string `json:"reason,omitempty"`
	// InFlight has, for each searcher, its expansions under way on this way.
	InFlight map[string]Claim `json:"in_flight,omitempty"`
}

// Claim is what one searcher has under way. It counts until its time is over, so that nobody waits for a searcher that
// crashed.
type Claim struct {
	Count int       `json:"count"`
	Until time.Time `json:"until"`
}

// Record is what the annotation of a node holds. All searchers change it by compare-and-set.
type Record struct {
	// Action is the name of the action that led to the node; empty at a root.
	Action string `json:"action,omitempty"`
	// Value is the node's own value; nil for a root that was not evaluated.
	Value *float64 `json:"value,omitempty"`
	// Terminal says that nothing can be tried here.
	Terminal bool `json:"terminal,omitempty"`
	// Data has what the problem keeps with the node.
	Data json.RawMessage `json:"data,omitempty"`
	// Visits is N(s): 1 if the node has a value of its own, and the visits of its edges.
	Visits int64 `json:"visits"`
	// ValueSum is the sum of these values.
	ValueSum float64 `json:"value_sum"`
	// Min and Max are the least and the greatest of these values; both 0 while Visits is 0.
	Min float64 `json:"min"`
	Max float64 `json:"max"`
	// Done says that nothing is left to be tried here and below.
	Done bool `json:"done,omitempty"`
	// Edges are the actions, in the order of the proposal; nil: none have been proposed yet.
	Edges []Edge `json:"edges,omitempty"`
	// Proposed tells no actions from no proposal.
	Proposed bool `json:"proposed,omitempty"`
}

// Errors of records.
var (
	errTooLarge = errors.New("it is too large for the annotations of a checkpoint; propose fewer actions, or keep less data with them")
	errMangled  = errors.New("another program has changed it, or it was written by a newer version")
)

// decode reads a record and refuses what no searcher writes.
func decode(b []byte) (Record, error) {
	var r Record
	if len(b) > 2*MaxRecord { // the server may add white space
		return r, fmt.Errorf("%w: %d bytes", errMangled, len(b))
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return Record{}, fmt.Errorf("%w: %w", errMangled, err)
	}
	names := map[string]bool{}
	for _, e := range r.Edges {
		if e.Name == "" || names[e.Name] || e.Visits < 0 || len(e.InFlight) > MaxSearchers {
			return Record{}, fmt.Errorf("%w: edge %q", errMangled, e.Name)
		}
		names[e.Name] = true
	}
	if r.Visits < 0 {
		return Record{}, fmt.Errorf("%w: %d visits", errMangled, r.Visits)
	}
	return r, nil
}

// encode writes a record. If there is no room for the claims of all, it leaves out those that keep no other searcher from
// trying the same action: without them there is less virtual loss.
func (r *Record) encode() ([]byte, error) {
	b, err := json.Marshal(r)
	if err != nil || len(b) <= MaxRecord {
		return b, err
	}
	small := r.clone()
	for i := range small.Edges {
		if small.Edges[i].Child != "" {
			small.Edges[i].InFlight = nil
		}
	}
	if b, err = json.Marshal(&small); err == nil && len(b) > MaxRecord {
		return nil, fmt.Errorf("%w: %d bytes, at most %d", errTooLarge, len(b), MaxRecord)
	}
	return b, err
}

// clone copies what a searcher changes.
func (r *Record) clone() Record {
	c := *r
	c.Edges = slices.Clone(r.Edges)
	for i := range c.Edges {
		c.Edges[i].InFlight = maps.Clone(c.Edges[i].InFlight)
	}
	return c
}

// mean is Q(s), 0 without visits.
func (r *Record) mean() float64 { return mean(r.ValueSum, r.Visits) }

func mean(sum float64, visits int64) float64 {
	if visits == 0 {
		return 0
	}
	return sum / float64(visits)
}

// edge returns an edge by its action; nil if there is none.
func (r *Record) edge(action string) *Edge {
	for i := range r.Edges {
		if r.Edges[i].Name == action {
			return &r.Edges[i]
		}
	}
	return nil
}

// propose sets the edges, unless another searcher was faster.
func (r *Record) propose(actions []Action) error {
	if r.Proposed {
		return nil
	}
	size, names := 0, map[string]bool{}
	for _, a := range actions {
		switch {
		case a.Name == "" || len(a.Name) > maxName:
			return fmt.Errorf("action %.*q: a name has 1 to %d bytes", maxName, a.Name, maxName)
		case names[a.Name]:
			return fmt.Errorf("two actions of a node are named %q", a.Name)
		case a.Prior < 0 || math.IsNaN(a.Prior) || math.IsInf(a.Prior, 0):
			return fmt.Errorf("the prior of action %q is %v", a.Name, a.Prior)
		}
		names[a.Name] = true
		r.Edges = append(r.Edges, Edge{Action: a})
		size += triedBytes
	}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if size += len(b); size > MaxRecord {
		return fmt.Errorf("%d actions: %w: %d bytes when all are tried, at most %d", len(actions), errTooLarge, size, MaxRecord)
	}
	r.Proposed = true
	return nil
}

// clip cuts a reason to MaxReason.
func clip(reason string) string {
	reason, size := strings.ToValidUTF8(reason, "?"), 0
	for i, c := range reason {
		b, err := json.Marshal(string(c))
		if size += len(b) - len(`""`); err != nil || size > MaxReason {
			return reason[:i]
		}
	}
	return reason
}

// merge takes over what is known of a child. It can be repeated, and done in any order: visits only grow.
func (e *Edge) merge(child string, r *Record) {
	if e.Child != "" && e.Child != child {
		return // another searcher tried the same action after the claim of the first was over, and was faster
	}
	if e.Child == "" && r.Value != nil {
		e.Value = *r.Value
	}
	e.Child, e.Done = child, e.Done || r.Done || r.Terminal
	if r.Visits > e.Visits {
		e.Visits, e.ValueSum, e.Min, e.Max = r.Visits, r.ValueSum, r.Min, r.Max
	}
}

// count sums up the node's own value and its edges.
func (r *Record) count() {
	r.Visits, r.ValueSum, r.Min, r.Max = 0, 0, 0, 0
	add := func(visits int64, sum, least, greatest float64) {
		if visits == 0 {
			return
		}
		if r.Visits == 0 {
			r.Min, r.Max = least, greatest
		}
		r.Visits, r.ValueSum, r.Min, r.Max = r.Visits+visits, r.ValueSum+sum, min(r.Min, least), max(r.Max, greatest)
	}
	if v := r.Value; v != nil {
		add(1, *v, *v, *v)
	}
	done := r.Proposed
	for i := range r.Edges {
		e := &r.Edges[i]
		add(e.Visits, e.ValueSum, e.Min, e.Max)
		done = done && e.Done
	}
	r.Done = r.Done || done || r.Terminal
}

// claim sets what one searcher has under way at an edge. It drops claims whose time is over, but not at an edge that was not
// tried: what the searcher that crashed has left there must be looked for first.
func (e *Edge) claim(searcher string, c Claim, now time.Time) {
	if e.Child != "" || e.Done {
		e.drop(now)
	}
	delete(e.InFlight, searcher)
	exclusive := e.Child == "" && len(e.InFlight) > 0
	if c.Count > 0 && !exclusive && len(e.InFlight) < MaxSearchers {
		if e.InFlight == nil {
			e.InFlight = map[string]Claim{}
		}
		e.InFlight[searcher] = c
	}
	if len(e.InFlight) == 0 {
		e.InFlight = nil
	}
}

// drop removes the claims whose time is over.
func (e *Edge) drop(now time.Time) {
	maps.DeleteFunc(e.InFlight, func(_ string, c Claim) bool { return !now.Before(c.Until) })
}

// others counts the expansions of other searchers under way at an edge.
func (e *Edge) others(searcher string, now time.Time) int {
	n := 0
	for name, c := range e.InFlight {
		if name != searcher && now.Before(c.Until) {
			n += max(c.Count, 0)
		}
	}
	return n
}

// abandoned reports whether an edge that was not tried has only claims whose time is over.
func (e *Edge) abandoned(searcher string, now time.Time) bool {
	if e.Child != "" || e.Done {
		return false
	}
	over := 0
	for name, c := range e.InFlight {
		if now.Before(c.Until) {
			return false
		}
		if name != searcher {
			over++
		}
	}
	return over > 0
}

// abandon has every searcher look for a child before it tries the action again.
func (e *Edge) abandon() {
	if e.Child != "" || e.Done {
		return
	}
	if e.InFlight == nil {
		e.InFlight = map[string]Claim{}
	}
	e.InFlight[earlier] = Claim{Count: 1}
}

// disown ends the claims that a searcher left before it restarted.
func (r *Record) disown(searcher string) {
	for i := range r.Edges {
		if c, ok := r.Edges[i].InFlight[searcher]; ok {
			delete(r.Edges[i].InFlight, searcher)
			r.Edges[i].InFlight[earlier] = Claim{Count: c.Count}
		}
	}
}
