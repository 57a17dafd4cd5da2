package postgres

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// The nodes that a tree shows. A failed capture was never a node, one that runs is not one yet.
const shown = ` NOT c.pruned AND c.state IN ('captured', 'sealed', 'deleted')`

type ancestorRow struct {
	ID          core.CheckpointID         `db:"id"`
	Kind        controller.CheckpointKind `db:"kind"`
	State       core.CheckpointState      `db:"state"`
	Parent      core.CheckpointID         `db:"parent"`
	Depth       int                       `db:"depth"`
	WorkspaceID core.WorkspaceID          `db:"workspace_id"`
	Name        string                    `db:"name"`
	Annotations json.RawMessage           `db:"annotations"`
	Pinned      bool                      `db:"pinned"`
	CreatedAt   time.Time                 `db:"created_at"`
	CapturedAt  *time.Time                `db:"captured_at"`
}

// ancestorColumns are the columns of the relation c.
const ancestorColumns = `
	c.id, c.kind, c.state, coalesce(c.parent_id, '') AS parent, c.depth, coalesce(c.workspace_id, '') AS workspace_id, coalesce(c.name, '') AS name,
	c.annotations, c.pinned, c.created_at, c.captured_at`

// Lineage walks from a node to its root along the primary key: one index probe for each generation of the page (LIMIT 1: see workspaceJoins).
func (t *tx) Lineage(ctx context.Context, id, after core.CheckpointID, limit int) ([]controller.Ancestor, error) {
	start, skip := id, 0
	if after != "" {
		start, skip = after, 1
	}
	// Not sorted there, rows come while the walk goes on, and are decoded meanwhile.
	rows, err := pgtx.Many[ancestorRow](ctx, t, `
		WITH RECURSIVE up AS (
			SELECT`+ancestorColumns+`, 0 AS n FROM checkpoints c WHERE c.id = @start
			UNION ALL
			SELECT p.*, up.n + 1 FROM up CROSS JOIN LATERAL (SELECT`+ancestorColumns+` FROM checkpoints c WHERE c.id = up.parent LIMIT 1) p
			WHERE up.n + 1 < @limit::int + @skip::int
		)
		SELECT id, kind, state, parent, depth, workspace_id, name, annotations, pinned, created_at, captured_at FROM up WHERE n >= @skip`,
		pgtx.Args{"start": start, "skip": skip, "limit": limit})
	if err != nil {
		return nil, err
	}
	list := make([]controller.Ancestor, len(rows))
	for i, r := range rows {
		list[i] = controller.Ancestor{
			ID: r.ID, Kind: r.Kind, State: r.State, Parent: r.Parent, Depth: r.Depth, WorkspaceID: r.WorkspaceID, Name: r.Name, Annotations: r.Annotations,
			Pinned: r.Pinned, CreatedAt: r.CreatedAt, CapturedAt: pgtx.TimeOf(r.CapturedAt),
		}
	}
	slices.SortFunc(list, func(a, b controller.Ancestor) int { return b.Depth - a.Depth })
	return list, nil
}

type nodeRow struct {
	ID       core.CheckpointID `db:"id"`
	Relative int               `db:"relative"`
}

// Tree lists the descendants of a node, breadth first: by generation, then by id. The ids of the page are found first, for its
// columns cost more than finding it.
func (t *tx) Tree(ctx context.Context, id core.CheckpointID, p controller.TreePage) ([]controller.TreeNode, error) {
	top, err := t.Checkpoint(ctx, id)
	if err != nil {
		return nil, err
	}
	if p.After == "" {
		p.AfterDepth = -1
	}
	find := t.below
	if top.Parent == "" && t.Scope() != controller.System() {
		find = t.belowRoot
	}
	nodes, err := find(ctx, id, p)
	if err != nil || len(nodes) == 0 {
		return nil, err
	}
	return t.fill(ctx, nodes)
}

// belowRoot reads the page off an index that has its order.
func (t *tx) belowRoot(ctx context.Context, id core.CheckpointID, p controller.TreePage) ([]nodeRow, error) {
	return pgtx.Many[nodeRow](ctx, t, `
		SELECT id, relative FROM (
			(SELECT c.id, 0 AS relative FROM checkpoints c WHERE c.id = @id AND @after_depth::int < 0)
			UNION ALL
			(SELECT c.id, c.depth FROM checkpoints c
			WHERE c.project_id = @project AND c.root_id = @id AND c.id <> @id AND`+shown+` AND (@max::int < 0 OR c.depth <= @max)
				AND (c.depth, c.id) > (@after_depth::int, @after::text) ORDER BY c.depth, c.id LIMIT @limit)
		) AS both_parts ORDER BY relative, id LIMIT @limit`,
		pgtx.Args{"id": id, "project": t.Scope().String(), "max": p.MaxDepth, "after_depth": p.AfterDepth, "after": p.After, "limit": p.Limit})
}

// below walks from a node down, at first only some generations beyond the page before: the first page of a large tree must
// not cost all of it.
func (t *tx) below(ctx context.Context, id core.CheckpointID, p controller.TreePage) ([]nodeRow, error) {
	for reach := 4; ; reach *= 4 {
		depth := max(p.AfterDepth, 0) + reach
		last := p.MaxDepth >= 0 && depth >= p.MaxDepth
		if last {
			depth = p.MaxDepth
		}
		nodes, err := pgtx.Many[nodeRow](ctx, t, `
			WITH RECURSIVE down AS (
				SELECT c.id, 0 AS relative FROM checkpoints c WHERE c.id = @id
				UNION ALL
				SELECT c.id, down.relative + 1 FROM checkpoints c JOIN down ON c.parent_id = down.id WHERE`+shown+` AND down.relative < @depth::int
			), deepest AS (
				SELECT max(relative) AS relative FROM down
			)
			SELECT id, relative FROM (
				SELECT id, relative FROM down WHERE (relative, id) > (@after_depth::int, @after::text) ORDER BY relative, id LIMIT @limit
			) AS page
			UNION ALL SELECT '', relative FROM deepest`,
			pgtx.Args{"id": id, "depth": depth, "after_depth": p.AfterDepth, "after": p.After, "limit": p.Limit})
		if err != nil {
			return nil, err
		}
		deepest, nodes := nodes[len(nodes)-1].Relative, nodes[:len(nodes)-1]
		if last || len(nodes) == p.Limit || deepest < depth {
			return nodes, nil
		}
	}
}

// fill reads the checkpoints of a page, their children's number and the workspaces on top of them.
func (t *tx) fill(ctx context.Context, rows []nodeRow) ([]controller.TreeNode, error) {
	ids, at := make([]core.CheckpointID, len(rows)), make(map[core.CheckpointID]int, len(rows))
	for i, r := range rows {
		ids[i], at[r.ID] = r.ID, i
	}
	list, err := t.page(ctx, `SELECT`+pageColumns+`, 0 AS children_count FROM checkpoints c`+checkpointJoins+` WHERE c.id = ANY(@ids::text[])`, pgtx.Args{"ids": pgtx.Texts(ids)})
	if err != nil {
		return nil, err
	}
	nodes := make([]controller.TreeNode, len(rows))
	for _, c := range list {
		nodes[at[c.ID]] = controller.TreeNode{Checkpoint: c, Depth: rows[at[c.ID]].Relative}
	}
	workspaces, err := t.HeadWorkspaces(ctx, ids)
	for _, w := range workspaces {
		n := &nodes[at[w.Head]]
		n.Workspaces = append(n.Workspaces, w)
	}
	if err != nil {
		return nil, err
	}
	effects, err := t.CountEffects(ctx, ids)
	for id, n := range effects {
		nodes[at[id]].Effects = n
	}
	return nodes, err
}
