package search

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// The cases in sdk/conformance/search are those of every SDK with searches; its README describes them.

// cases reads a file of them.
func cases(t *testing.T, name string, out any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "conformance", "search", name))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, out); err != nil {
		t.Fatal(err)
	}
}

// recordOf reads a record as a searcher does.
func recordOf(t *testing.T, b json.RawMessage) Record {
	t.Helper()
	r, err := decode(b)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// same compares what a searcher writes for two records.
func same(t *testing.T, name string, got *Record, want json.RawMessage) {
	t.Helper()
	wanted := recordOf(t, want)
	a, err := got.encode()
	if err != nil {
		t.Fatal(err)
	}
	b, err := wanted.encode()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(b), string(a)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

// edgeOf is a record with one edge.
func edgeOf(edge json.RawMessage) json.RawMessage {
	return slices.Concat(json.RawMessage(`{"edges":[`), edge, json.RawMessage(`]}`))
}

func TestConformanceOfRecords(t *testing.T) {
	t.Parallel()
	var all struct {
		Kept     []struct{ Name, Read, Written string }
		Refused  []struct{ Name, Read string }
		TooLarge []struct{ Name, Read string } `json:"too_large"`
		Counted  []struct {
			Name         string
			Record, Want json.RawMessage
		}
	}
	cases(t, "records.json", &all)
	for _, c := range all.Kept {
		r, err := decode([]byte(c.Read))
		if err != nil {
			t.Errorf("%s: %v", c.Name, err)
			continue
		}
		b, err := r.encode()
		if diff := cmp.Diff(c.Written, string(b)); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", c.Name, err, diff)
		}
	}
	for _, c := range all.Refused {
		if _, err := decode([]byte(c.Read)); !errors.Is(err, errMangled) {
			t.Errorf("%s is not refused: %v", c.Name, err)
		}
	}
	for _, c := range all.TooLarge {
		r := recordOf(t, json.RawMessage(c.Read))
		if _, err := r.encode(); !errors.Is(err, errTooLarge) {
			t.Errorf("%s is not too large: %v", c.Name, err)
		}
	}
	for _, c := range all.Counted {
		r := recordOf(t, c.Record)
		r.count()
		same(t, c.Name, &r, c.Want)
	}
}

func TestConformanceOfProposals(t *testing.T) {
	t.Parallel()
	var all struct {
		Proposals []struct {
			Name    string
			Record  json.RawMessage
			Actions []Action
			Want    *json.RawMessage
		}
		Reasons []struct{ Name, Reason, Want string }
	}
	cases(t, "proposals.json", &all)
	for _, c := range all.Proposals {
		r := recordOf(t, c.Record)
		switch err := r.propose(c.Actions); {
		case (err == nil) != (c.Want != nil):
			t.Errorf("%s: %v", c.Name, err)
		case err == nil:
			same(t, c.Name, &r, *c.Want)
		}
	}
	for _, c := range all.Reasons {
		if got := clip(c.Reason); got != c.Want {
			t.Errorf("%s: %q, want %q", c.Name, got, c.Want)
		}
	}
}

func TestConformanceOfMerges(t *testing.T) {
	t.Parallel()
	var all struct {
		Merges []struct {
			Name       string
			Edge, Want json.RawMessage
			Steps      []struct {
				Child    string
				Record   json.RawMessage
				Settle   bool
				Reason   string
				Value    float64
				Terminal bool
			}
		}
	}
	cases(t, "merges.json", &all)
	for _, c := range all.Merges {
		r := recordOf(t, edgeOf(c.Edge))
		for _, s := range c.Steps {
			if s.Settle {
				r.Edges[0].settle(Outcome{Child: s.Child, Reason: s.Reason, Value: s.Value, Terminal: s.Terminal})
				continue
			}
			child := recordOf(t, s.Record)
			r.Edges[0].merge(s.Child, &child)
		}
		same(t, c.Name, &r, edgeOf(c.Want))
	}
}

func TestConformanceOfClaims(t *testing.T) {
	t.Parallel()
	var all struct {
		Claims []struct {
			Name         string
			Now          time.Time
			Record, Want json.RawMessage
			Steps        []struct {
				Do, Action, Searcher string
				Claim
			}
			Seen []struct {
				Action, Searcher string
				Others           int
				Abandoned        bool
			}
		}
	}
	cases(t, "claims.json", &all)
	for _, c := range all.Claims {
		r := recordOf(t, c.Record)
		for _, s := range c.Steps {
			switch e := r.edge(s.Action); s.Do {
			case "claim":
				e.claim(s.Searcher, s.Claim, c.Now)
			case "drop":
				e.drop(c.Now)
			case "abandon":
				e.abandon()
			case "disown":
				r.disown(s.Searcher)
			default:
				t.Fatalf("%s: step %q", c.Name, s.Do)
			}
		}
		same(t, c.Name, &r, c.Want)
		for _, s := range c.Seen {
			e := r.edge(s.Action)
			if others, abandoned := e.others(s.Searcher, c.Now), e.abandoned(s.Searcher, c.Now); others != s.Others || abandoned != s.Abandoned {
				t.Errorf("%s: to %s, %s has %d others, abandoned: %v; want %d, %v", c.Name, s.Searcher, s.Action, others, abandoned, s.Others, s.Abandoned)
			}
		}
	}
}

// setting is a strategy of the cases.
type setting struct {
	Kind         string
	C, FPU       float64
	VirtualLoss  float64 `json:"virtual_loss"`
	MinMax       bool    `json:"min_max"`
	Widening     float64
	N            int
	Width, Depth int
}

func (s setting) strategy() Strategy {
	return map[string]Strategy{
		"UCT":     UCT{C: s.C, VirtualLoss: s.VirtualLoss, MinMax: s.MinMax, Widening: s.Widening},
		"PUCT":    PUCT{C: s.C, FPU: s.FPU, VirtualLoss: s.VirtualLoss, MinMax: s.MinMax},
		"BestOfN": BestOfN{N: s.N},
		"Beam":    Beam{Width: s.Width, Depth: s.Depth},
	}[s.Kind]
}

// choice is what a searcher named "me" knows of a tree, and what it does next.
type choice struct {
	Name        string
	Now         time.Time
	Strategy    setting
	Batch       int
	Nodes       map[string]json.RawMessage // those that were read
	Stale, Busy []string
	Lost        map[string][]string
	Marks       []struct { // what the searcher has under way
		Node    string
		Actions []string
	}
	Want struct {
		Step, Node string
		Actions    []string
		Waiting    bool
	}
}

// tree builds what the searcher knows.
func (c choice) tree(t *testing.T) *tree {
	t.Helper()
	all := map[string]*node{}
	var build func(*node)
	build = func(n *node) {
		all[n.id] = n
		b, read := c.Nodes[n.id]
		if !read {
			return
		}
		n.record, n.version, n.stale = recordOf(t, b), 1, slices.Contains(c.Stale, n.id)
		n.busy = slices.Contains(c.Busy, n.id)
		for _, action := range c.Lost[n.id] {
			if n.lost == nil {
				n.lost = map[string]bool{}
			}
			n.lost[action] = true
		}
		for i := range n.record.Edges {
			if n.record.Edges[i].Child != "" {
				build(n.child(&n.record.Edges[i]))
			}
		}
	}
	root := newNode("root")
	build(root)
	for _, id := range c.Busy {
		all[id].busy = true
	}
	for _, m := range c.Marks {
		for _, name := range m.Actions {
			all[m.Node].mark([]Action{{Name: name}}, 1, c.Now.Add(time.Hour))
		}
	}
	return &tree{root: root, searcher: "me", now: func() time.Time { return c.Now }}
}

func TestConformanceOfStrategies(t *testing.T) {
	t.Parallel()
	var all struct {
		Choices   []choice
		Proposals []struct {
			Strategy      setting
			Depth         int
			Actions, Want []string
		}
	}
	cases(t, "strategies.json", &all)
	steps := map[step]string{stepNothing: "nothing", stepRead: "read", stepPropose: "propose", stepAdopt: "adopt", stepExpand: "expand"}
	for _, c := range all.Choices {
		d := c.Strategy.strategy().choose(c.tree(t), c.Batch)
		got := c.Want
		got.Step, got.Node, got.Waiting, got.Actions = steps[d.step], "", d.waiting, []string{}
		if d.node != nil {
			got.Node = d.node.id
		}
		for _, a := range d.actions {
			got.Actions = append(got.Actions, a.Name)
		}
		if diff := cmp.Diff(c.Want, got); diff != "" {
			t.Errorf("%s, %+v (-want +got):\n%s", c.Name, c.Strategy, diff)
		}
	}
	for _, c := range all.Proposals {
		actions := []Action{}
		for _, name := range c.Actions {
			actions = append(actions, Action{Name: name, Prior: 0.5})
		}
		got := []string{}
		for _, a := range c.Strategy.strategy().proposals(c.Depth, actions) {
			if got = append(got, a.Name); math.Abs(a.Prior-0.5) > 0 {
				t.Errorf("%+v: the prior of %s is %v", c.Strategy, a.Name, a.Prior)
			}
		}
		if !slices.Equal(got, c.Want) {
			t.Errorf("%+v proposes %q at depth %d, want %q", c.Strategy, got, c.Depth, c.Want)
		}
	}
}
