// Package search searches over a tree of running machines: UCT, PUCT, best-of-N and beam search, whose nodes are checkpoints and whose
// rollouts are forks.
//
//	forks := &search.Forks{
//		Checkpoints: search.Checkpoints{Client: client},
//		Propose:     propose, // what can be tried at a node, with priors: a language model, say
//		Act:         act,     // does one action in a fork, and returns its value
//	}
//	s, err := search.New(search.Config{
//		Root: checkpoint.ID, Problem: forks, Store: forks,
//		Strategy: search.PUCT{C: 1.25}, Parallel: 8, Budget: 200, Goal: new(1.0),
//	})
//	r, err := s.Run(ctx) // r.Best.Path() are the actions that lead to the best node
//
// # One step
//
// A step selects a node from the root by the strategy, expands it by up to Batch actions, each in a fork of its own, evaluates each result,
// and backs the values up to the root. Parallel steps are under way at once. A step that is under way counts as a virtual loss on its
// whole way, so that the others spread.
//
// Values are float64, the greater the better. UCT and PUCT expect them between 0 and 1, or MinMax. N are visits: values that are known of
// a node and below it, its own included. Every node has one value, that of its evaluation, because a checkpoint is always the same: a node
// is never evaluated again, and a terminal node is never descended to again. So N(s) is the number of nodes evaluated in the subtree of s.
//
// # Several searchers, and crashes
//
// All that a search knows is in the tree: a Record with each node, which all searchers change by compare-and-set. So any number of
// programs may search one tree, each with a Search of its own. A searcher that crashed continues when it is run again. An action is tried by
// one searcher only, which claims it first. Each claim has an end time: half a minute after its Lease. Its virtual loss ends then, too.
// Before others try an action whose claim has ended, they look for the child that the searcher may have made before it crashed, and take
// it over. An edge copies the totals of its child. A node's totals are its own value and the sum of its edges. So a step that was
// backed up halfway, or twice, counts once. Statistics of deleted checkpoints stay in the edges of their parents.
//
// # The annotation
//
// The record is JSON under the key "coppice.search/v1", or "coppice.search/v1/NAME" for a search with a name. Programs in other languages
// may take part, if they keep to this:
//
//	{
//	  "action": "edit a",        // name of the action that led here; absent at a root
//	  "value": 0.5,              // own value; absent for a root that was not evaluated
//	  "terminal": true,          // nothing can be tried here; absent: false
//	  "data": {"passed": 68},    // whatever the problem keeps with the node
//	  "visits": 3,               // N(s): 1 if there is a value, and the visits of the edges
//	  "value_sum": 1.75,         // W(s): the sum of these values; the mean is W/N
//	  "min": 0.5, "max": 0.75,   // the least and the greatest of these values; 0 without visits
//	  "done": true,              // nothing is left to be tried here and below; never taken back
//	  "proposed": true,          // "edges" has the actions, perhaps none; neither names nor order change afterwards
//	  "edges": [{
//	    "action": "edit b",      // its name, unique in the node
//	    "prior": 0.75,           // P(s, a) up to a common factor; absent: 0
//	    "data": {"file": "x"},   // what the problem needs to do it
//	    "child": "ckpt_…",       // the node that it led to; never changed
//	    "value": 0.75,           // the child's own value
//	    "visits": 2, "value_sum": 1.25, "min": 0.5, "max": 0.75, // the child's totals: taken over if its visits are more
//	    "done": true,            // nothing is left on this way; without "child": it was tried and led to no node
//	    "reason": "…",           // why it led to no node
//	    "in_flight": {           // by the name of a searcher
//	      "worker 1": {"count": 2, "until": "2026-11-28T15:00:00Z"} // steps under way on this way; nothing after that time
//	    }
//	  }]
//	}
//
// An edge without "child" and "done" may be claimed by one searcher at a time. An expired claim stays there until a searcher has looked for
// the child among the children of the checkpoint, by the "action" in their records. A record has at most 12 KiB. Beside it are the numbers
// "score" (the node's own value), "mean" and "visits", for people and for retention policies.
//
// # Known limits
//
// An action can be tried twice, and one of the two children is then left over, if a searcher that made a child can neither write it down nor say that
// it was made, and another one looks for children before the child's checkpoint exists. If a checkpoint of the tree is deleted while its
// children are made, their values are lost, and the search can end with an error.
package search
