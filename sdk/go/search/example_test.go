package search_test

import (
	"context"
	"fmt"

	"github.com/coppice-dev/coppice/sdk/go/search"
)

// coins is a problem without machines: reach 42 with coins of 5, 10 and 16, where the value of a node is how near it is.
type coins struct{ search.Memory }

func sum(path []string) (total int) {
	for _, coin := range path {
		total += map[string]int{"5": 5, "10": 10, "16": 16}[coin]
	}
	return total
}

func (c *coins) Actions(context.Context, *search.Node) ([]search.Action, error) {
	return []search.Action{{Name: "5", Prior: 0.2}, {Name: "10", Prior: 0.3}, {Name: "16", Prior: 0.5}}, nil
}

func (c *coins) Expand(_ context.Context, n *search.Node, actions []search.Action) ([]search.Outcome, error) {
	out := make([]search.Outcome, len(actions))
	for i, a := range actions {
		total := sum(append(n.Path(), a.Name))
		out[i] = search.Outcome{Child: n.ID + "+" + a.Name, Value: float64(total) / 42, Terminal: total >= 37}
		if total > 42 {
			out[i] = search.Outcome{Reason: "too much"}
		}
	}
	return out, nil
}

// A problem on machines has the same form: search.Forks makes it of a function that proposes actions and one that does them in a fork.
func Example() {
	c := &coins{}
	s, err := search.New(search.Config{
		Root: "0", Problem: c, Store: c,
		Strategy: search.PUCT{C: 1.25}, Parallel: 1, Budget: 200, Goal: new(1.0),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	r, err := s.Run(context.Background())
	fmt.Println(r.End, r.Best.Path(), err)
	// Output: goal reached [16 16 10] <nil>
}
