package retention_test

import (
	"cmp"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/core"
)

// model is the plan as the documents describe it, from whole nodes and maps. Tree.Plan must decide the same with less memory.
func model(nodes []retention.Node, p retention.Policy, now time.Time) retention.Plan {
	protected := protect(nodes, p)
	free := make([]retention.Node, 0, len(nodes))
	var plan retention.Plan
	for _, n := range nodes {
		switch {
		case n.Gone:
		case protected[n.ID]:
			keep(&plan, n)
		default:
			free = append(free, n)
		}
	}
	slices.SortFunc(free, worstFirst)
	left := plan.KeptBytes
	for _, n := range free {
		left += n.Bytes
	}
	chosen := func(n retention.Node) string {
		switch {
		case p.MaxAge > 0 && now.Sub(n.CreatedAt) > p.MaxAge:
			return retention.ReasonAge
		case p.MaxAge == 0 && p.MaxBytes == 0:
			return retention.ReasonNotKept
		}
		return ""
	}
	for _, n := range free { // those that go in any case make room for others
		if chosen(n) != "" {
			left -= n.Bytes
		}
	}
	for _, n := range free {
		reason := chosen(n)
		if reason == "" && p.MaxBytes > 0 && left > p.MaxBytes {
			reason = retention.ReasonBytes
			left -= n.Bytes
		}
		if reason == "" {
			keep(&plan, n)
			continue
		}
		plan.Remove = append(plan.Remove, retention.Removal{n.ID, reason, n.Bytes})
	}
	slices.SortFunc(plan.Remove, func(a, b retention.Removal) int { return cmp.Compare(a.ID, b.ID) })
	plan.Over = p.MaxBytes > 0 && plan.KeptBytes > p.MaxBytes
	return plan
}

func keep(p *retention.Plan, n retention.Node) {
	p.Kept++
	p.KeptBytes += n.Bytes
}

// protect returns the nodes that may not be chosen.
func protect(nodes []retention.Node, p retention.Policy) map[core.CheckpointID]bool {
	keep := map[core.CheckpointID]bool{}
	parents := make(map[core.CheckpointID]core.CheckpointID, len(nodes))
	scored := make([]retention.Node, 0, len(nodes))
	for _, n := range nodes {
		parents[n.ID] = n.Parent
		if n.Held != "" {
			keep[n.ID] = true
		}
		if n.Score != nil && !n.Gone {
			scored = append(scored, n)
		}
	}
	slices.SortFunc(scored, func(a, b retention.Node) int { return worstFirst(b, a) })
	for _, n := range scored[:min(p.KeepBest, len(scored))] {
		keep[n.ID] = true
	}
	if !p.KeepPathToRoot {
		return keep
	}
	for _, n := range nodes {
		if !keep[n.ID] {
			continue
		}
		for at := parents[n.ID]; at != "" && !keep[at]; at = parents[at] {
			keep[at] = true
		}
	}
	return keep
}

// worstFirst sorts by score, those without one first, then by age.
func worstFirst(a, b retention.Node) int {
	switch {
	case a.Score == nil && b.Score != nil:
		return -1
	case a.Score != nil && b.Score == nil:
		return 1
	case a.Score != nil && *a.Score != *b.Score:
		return cmp.Compare(*a.Score, *b.Score)
	}
	return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
}
