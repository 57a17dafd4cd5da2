package search

import (
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

// format is the annotation as the package doc describes it.
const format = `{"action":"edit a","value":0.5,"data":{"passed":68},"visits":3,"value_sum":1.75,"min":0.5,"max":0.75,` +
	`"edges":[{"action":"edit b","prior":0.75,"data":{"file":"x"},"child":"ckpt_1","value":0.75,"visits":2,"value_sum":1.25,"min":0.5,"max":0.75,` +
	`"in_flight":{"worker 1":{"count":2,"until":"2026-11-28T15:00:00Z"}}},` +
	`{"action":"edit c","prior":0.25,"done":true,"reason":"it does not apply"}],"proposed":true}`

func TestFormat(t *testing.T) {
	t.Parallel()
	r := Record{
		Action: "edit a", Value: new(0.5), Data: json.RawMessage(`{"passed":68}`), Proposed: true,
		Edges: []Edge{
			{
				Action: Action{"edit b", 0.75, json.RawMessage(`{"file":"x"}`)}, Child: "ckpt_1", Value: 0.75, Visits: 2, ValueSum: 1.25, Min: 0.5, Max: 0.75,
				InFlight: map[string]Claim{"worker 1": {2, time.Date(2026, 11, 28, 15, 0, 0, 0, time.UTC)}},
			},
			{Action: Action{Name: "edit c", Prior: 0.25}, Done: true, Reason: "it does not apply"},
		},
	}
	r.count()
	b, err := r.encode()
	if err != nil || string(b) != format {
		t.Errorf("%s, %v\nwant %s", b, err, format)
	}
	again, err := decode([]byte(format))
	if diff := cmp.Diff(r, again); err != nil || diff != "" {
		t.Errorf("%v; read again (-want +got):\n%s", err, diff)
	}
}

func TestDecodeRefuses(t *testing.T) {
	t.Parallel()
	for _, s := range []string{
		``, `5`, `[]`, `"x"`, `{"visits":-1}`, `{"visits":"many"}`, `{"visits":1.5}`, `{"value":1e999}`, `{"edges":[{}]}`, `{"edges":[{"action":"a"},{"action":"a"}]}`,
		`{"edges":[{"action":"a","visits":-1}]}`, `{"edges":[{"action":"a","in_flight":{"x":{"until":"soon"}}}]}`, `{"data":"` + strings.Repeat("x", 2*MaxRecord) + `"}`,
	} {
		if r, err := decode([]byte(s)); !errors.Is(err, errMangled) || !cmp.Equal(r, Record{}) {
			t.Errorf("%.80s: %+v, %v", s, r, err)
		}
	}
}

func TestProposals(t *testing.T) {
	t.Parallel()
	many := make([]Action, 100)
	for i := range many {
		many[i].Name = strings.Repeat("x", i+1)
	}
	for _, actions := range [][]Action{
		{{Name: ""}},
		{{Name: "a"}, {Name: "a"}},
		{{Name: strings.Repeat("x", maxName+1)}},
		{{Name: "a", Prior: -1}},
		{{Name: "a", Prior: math.NaN()}},
		{{Name: "a", Data: json.RawMessage(`"` + strings.Repeat("x", MaxRecord) + `"`)}},
		many,
	} {
		if err := new(Record).propose(actions); err == nil {
			t.Errorf("%d actions passed: %.80v", len(actions), actions)
		}
	}
	var r Record
	if err := r.propose(many[:40]); err != nil {
		t.Fatal(err)
	}
	for i := range r.Edges { // what was proposed has room until all are tried
		r.Edges[i].settle(Outcome{Child: "ckpt_06e5bqv7z0f3m8k2h1t9r4w6xc", Value: 1.0 / 3})
		r.Edges[i].Visits, r.Edges[i].ValueSum = 123456, 123456.0/7
	}
	if _, err := r.encode(); err != nil {
		t.Error(err)
	}
	if err := r.propose([]Action{{Name: "other"}}); err != nil || len(r.Edges) != 40 {
		t.Errorf("a second proposal: %v, %d edges", err, len(r.Edges))
	}
	if r.count(); r.Done {
		t.Error("a node whose children are not done is done")
	}
	var none Record
	if err := none.propose(nil); err != nil || !none.Proposed {
		t.Errorf("no actions: %v, %+v", err, none)
	}
	if none.count(); !none.Done {
		t.Error("a node without actions is not done")
	}
}

// TestClaimsAreBounded: many searchers at many edges do not fill the annotation, and an edge that only one may try keeps its claim.
func TestClaimsAreBounded(t *testing.T) {
	t.Parallel()
	var r Record
	for i := range 30 {
		r.Edges = append(r.Edges, Edge{Action: Action{Name: strings.Repeat("x", i+1)}, Child: "ckpt_06e5bqv7z0f3m8k2h1t9r4w6xc", Visits: 1})
	}
	r.Edges = append(r.Edges, Edge{Action: Action{Name: "untried"}})
	now := time.Now()
	for i := range 2 * MaxSearchers {
		for k := range r.Edges {
			r.Edges[k].claim("searcher "+string(rune('0'+i)), Claim{1, now.Add(time.Hour)}, now)
		}
	}
	if n := len(r.Edges[0].InFlight); n != MaxSearchers {
		t.Errorf("%d searchers at an edge", n)
	}
	if n := len(r.Edges[30].InFlight); n != 1 {
		t.Errorf("%d searchers at an edge that only one may try", n)
	}
	b, err := r.encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := decode(b)
	if err != nil || got.Edges[0].InFlight != nil || len(got.Edges[30].InFlight) != 1 {
		t.Errorf("%v: %+v", err, got.Edges[30])
	}
}

// TestMerge: what is known of a child can arrive twice and in any order.
func TestMerge(t *testing.T) {
	t.Parallel()
	early := &Record{Value: new(0.5), Visits: 1, ValueSum: 0.5, Min: 0.5, Max: 0.5}
	late := &Record{Value: new(0.5), Visits: 3, ValueSum: 1.5, Min: 0.25, Max: 0.75, Done: true}
	want := Edge{Child: "c", Value: 0.5, Visits: 3, ValueSum: 1.5, Min: 0.25, Max: 0.75, Done: true}
	for _, order := range [][]*Record{{early, late}, {late, early}, {late, late, early}} {
		var e Edge
		for _, r := range order {
			e.merge("c", r)
		}
		e.merge("another", &Record{Value: new(9.0), Visits: 100, ValueSum: 900, Max: 9})
		if diff := cmp.Diff(want, e); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

// TestReasonsFit: as many actions as a node can have fit into its record, also when each of them led to no node for a reason that is long as JSON.
func TestReasonsFit(t *testing.T) {
	t.Parallel()
	for _, reason := range []string{strings.Repeat("x", 1000), strings.Repeat("\x00", 1000), strings.Repeat("é", 1000), strings.Repeat("\xff", 1000), strings.Repeat("<", 1000)} {
		var r Record
		actions := []Action{{Name: "0"}}
		for r.propose(actions) == nil {
			r = Record{}
			actions = append(actions, Action{Name: strconv.Itoa(len(actions))})
		}
		actions = actions[:len(actions)-1]
		r = Record{}
		if err := r.propose(actions); err != nil {
			t.Fatal(err)
		}
		for i := range r.Edges {
			r.Edges[i].settle(Outcome{Reason: reason})
			if b, err := json.Marshal(r.Edges[i].Reason); err != nil || len(b) > MaxReason+2 || utf8.ValidString(reason) && len(b) < MaxReason-6 {
				t.Fatalf("the reason is %s, %v", b, err)
			}
		}
		if _, err := r.encode(); err != nil || len(actions) < 40 {
			t.Errorf("%d actions with the reason %.4q…: %v", len(actions), reason, err)
		}
	}
}

// TestLostChildrenAreLookedFor: each write of a node keeps actions that may have led to a child from everybody, until somebody has looked for it.
func TestLostChildrenAreLookedFor(t *testing.T) {
	t.Parallel()
	var m Memory
	s := &Search{cfg: Config{Store: &m, Searcher: "me"}, tree: tree{root: newNode("root"), searcher: "me", now: time.Now}}
	n := s.tree.root
	n.lost = map[string]bool{"a": true}
	if err := s.update(t.Context(), n, nil, func(r *Record) error { return r.propose([]Action{{Name: "a"}, {Name: "b"}}) }); err != nil {
		t.Fatal(err)
	}
	r, _, err := m.Load(t.Context(), "root")
	if err != nil {
		t.Fatal(err)
	}
	for _, searcher := range []string{"me", "other"} {
		if a, b := r.edge("a").abandoned(searcher, time.Now()), r.edge("b").abandoned(searcher, time.Now()); !a || b {
			t.Errorf("to %q: a is to be looked for: %v, b: %v", searcher, a, b)
		}
	}
}
