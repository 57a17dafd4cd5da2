package postgres_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/core"
)

// wholeSubtree is the one statement that Subtree was, over the whole tree.
const wholeSubtree = `
	WITH RECURSIVE down AS (
		SELECT c.id FROM checkpoints c WHERE c.id = $1
		UNION ALL SELECT c.id FROM checkpoints c JOIN down ON c.parent_id = down.id WHERE c.project_id = $2 AND NOT c.pruned AND c.state IN ('captured', 'sealed', 'deleted')
	)
	SELECT c.id, coalesce(c.parent_id, '') AS parent_id, c.created_at, c.delta_bytes + c.device_state_bytes + c.disk_bytes AS bytes,
		CASE WHEN jsonb_typeof(c.annotations -> 'score') = 'number'
			THEN least(greatest((c.annotations ->> 'score')::numeric, -1e300), 1e300)::float8 END AS score,
		CASE WHEN c.state = 'deleted' THEN ''
			WHEN c.kind = 'template' THEN 'template'
			WHEN c.pinned THEN 'pinned'
			WHEN EXISTS (SELECT 1 FROM project_images i WHERE i.checkpoint_id = c.id) THEN 'image'
			WHEN c.state = 'capturing' OR EXISTS (SELECT 1 FROM operations o WHERE o.checkpoint_id = c.id AND o.state IN ('pending', 'running')) THEN 'operation'
			WHEN EXISTS (SELECT 1 FROM workspaces w WHERE w.checkpoint_id = c.id AND w.state = 'suspended') THEN 'suspended'
			WHEN EXISTS (SELECT 1 FROM workspaces w WHERE w.checkpoint_id = c.id AND w.ended_at IS NULL)
				OR EXISTS (SELECT 1 FROM workspaces w WHERE w.parent_checkpoint_id = c.id AND w.ended_at IS NULL) THEN 'workspace'
			ELSE '' END AS held,
		c.state = 'deleted' AS gone
	FROM down JOIN checkpoints c ON c.id = down.id`

func (d *db) wholeSubtree(conn *pgx.Conn, id core.CheckpointID) (list []retention.Node) {
	d.t.Helper()
	rows, err := conn.Query(d.t.Context(), wholeSubtree, string(id), string(d.project))
	if err != nil {
		d.t.Fatal(err)
	}
	for rows.Next() {
		var n retention.Node
		var bytes int64
		if err := rows.Scan((*string)(&n.ID), (*string)(&n.Parent), &n.CreatedAt, &bytes, &n.Score, &n.Held, &n.Gone); err != nil {
			d.t.Fatal(err)
		}
		n.Bytes = bytes
		list = append(list, n)
	}
	if rows.Err() != nil {
		d.t.Fatal(rows.Err())
	}
	return list
}

// walked reads a tree part by part, each in a transaction of its own, and checks that parents come first.
func (d *db) walked(id core.CheckpointID) (list []retention.Node) {
	d.t.Helper()
	seen := map[core.CheckpointID]bool{}
	for walk := (retention.Walk{ID: id}); !walk.Done(); {
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			nodes, next, err := tx.Subtree(ctx, walk, "score")
			if len(nodes) > 10_000 {
				d.t.Errorf("%d nodes in one part", len(nodes))
			}
			for _, n := range nodes {
				if seen[n.ID] || n.ID != id && !seen[n.Parent] {
					d.t.Errorf("%s comes twice or before its parent %s", n.ID, n.Parent)
				}
				seen[n.ID] = true
			}
			list, walk = append(list, nodes...), next
			return err
		})
	}
	return list
}

func byID(list []retention.Node) []retention.Node {
	slices.SortFunc(list, func(a, b retention.Node) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

// TestSubtreeAgainstModel reads random trees part by part and whole, deletes parts of them in batches, and compares what is shown then with
// the rule: a node is shown while it lives or something below it is shown.
func TestSubtreeAgainstModel(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	top := d.template()
	w := d.ready(d.project, top)
	conn := d.conn()
	foreign := d.ready(d.newProject("other"), top)
	d.node(foreign, top.ID) // nobody else sees it
	nodes := []core.CheckpointID{d.node(w, top.ID).ID}
	for i := range 90 {
		parent := nodes[random.IntN(len(nodes))]
		if i < 30 { // more children than one part has
			parent = nodes[0]
		} else if i < 60 { // a path
			parent = nodes[len(nodes)-1]
		}
		nodes = append(nodes, d.node(w, parent).ID)
		if random.IntN(2) == 0 {
			d.exec(`UPDATE checkpoints SET annotations = jsonb_build_object('score', $2::float8) WHERE id = $1`, nodes[len(nodes)-1], random.Float64())
		}
		if random.IntN(12) == 0 {
			d.exec(`UPDATE checkpoints SET pinned = true WHERE id = $1`, nodes[len(nodes)-1])
		}
	}
	d.exec(`UPDATE workspaces SET checkpoint_id = $1, checkpoint_project_id = $2 WHERE id = $3`, nodes[random.IntN(len(nodes))], d.project, w.ID)

	gone := map[core.CheckpointID]bool{}
	for round := range 6 {
		for _, id := range []core.CheckpointID{top.ID, nodes[0], nodes[45], nodes[random.IntN(len(nodes))]} {
			if !d.shownOf(conn)[id].shown {
				continue
			}
			if diff := gocmp.Diff(byID(d.wholeSubtree(conn, id)), byID(d.walked(id))); diff != "" {
				t.Fatalf("round %d, from %s (-whole +walked)\n%s", round, id, diff)
			}
		}
		var batch []core.CheckpointID
		for _, id := range nodes {
			if random.IntN(3) == 0 {
				batch = append(batch, id)
			}
		}
		held := map[core.CheckpointID]string{}
		for _, n := range d.wholeSubtree(conn, top.ID) {
			held[n.ID] = n.Held
		}
		var list []controller.Deletion
		d.mine(func(ctx context.Context, tx controller.AllTx) (err error) {
			list, err = tx.DeleteCheckpoints(ctx, batch, true)
			return err
		})
		for _, got := range list {
			if (got.Refused == nil) != (held[got.Checkpoint] == "") || got.Gone == (got.Refused != nil) {
				t.Fatalf("round %d: %+v, held by %q", round, got, held[got.Checkpoint])
			}
			if got.Gone {
				gone[got.Checkpoint] = true
			}
		}
		d.compareShown(conn, nodes, gone)
	}
}

type place struct {
	parent      core.CheckpointID
	shown, head bool
}

// shownOf reads where all nodes are and whether they are shown.
func (d *db) shownOf(conn *pgx.Conn) map[core.CheckpointID]place {
	d.t.Helper()
	rows, err := conn.Query(d.t.Context(), `
		SELECT c.id, coalesce(c.parent_id, ''), NOT c.pruned, EXISTS (SELECT FROM workspaces w WHERE w.checkpoint_id = c.id AND w.ended_at IS NULL) FROM checkpoints c`)
	if err != nil {
		d.t.Fatal(err)
	}
	all := map[core.CheckpointID]place{}
	var id string
	var p place
	if _, err := pgx.ForEachRow(rows, []any{&id, (*string)(&p.parent), &p.shown, &p.head}, func() error {
		all[core.CheckpointID(id)] = p
		return nil
	}); err != nil {
		d.t.Fatal(err)
	}
	return all
}

// compareShown compares the nodes that are not pruned with the rule.
func (d *db) compareShown(conn *pgx.Conn, nodes []core.CheckpointID, gone map[core.CheckpointID]bool) {
	d.t.Helper()
	all, want := d.shownOf(conn), map[core.CheckpointID]bool{}
	for _, id := range slices.Backward(nodes) { // children first
		if !gone[id] || all[id].head || want[id] {
			want[id], want[all[id].parent] = true, true
		}
		if all[id].shown != want[id] {
			d.t.Errorf("%s is shown: %v, want %v (deleted: %v)", id, all[id].shown, want[id], gone[id])
		}
	}
}

// TestPruneALongPath deletes the only leaf of a long path of deleted nodes: few statements, and the sweep does what is left.
func TestPruneALongPath(t *testing.T) {
	t.Parallel()
	const long = 5000
	d := newDB(t)
	top := d.template()
	w := d.ready(d.project, top)
	first := d.node(w, top.ID)
	d.exec(fmt.Sprintf(`SET session_replication_role = replica;
		INSERT INTO checkpoints SELECT (jsonb_populate_record(x, jsonb_build_object('id', 'path_' || lpad(n::text, 6, '0'), 'depth', n + 1, 'name', NULL, 'parent_project_id', x.project_id,
			'parent_id', CASE n WHEN 1 THEN x.id ELSE 'path_' || lpad((n - 1)::text, 6, '0') END,
			'state', CASE n WHEN %[1]d THEN 'captured' ELSE 'deleted' END, 'ended_at', CASE WHEN n < %[1]d THEN now() END))).*
		FROM checkpoints x, generate_series(1, %[1]d) n WHERE x.id = '%[2]s'`, long, first.ID))
	d.exec(`ANALYZE checkpoints`)
	leaf := core.CheckpointID(fmt.Sprintf("path_%06d", long))
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.DeleteCheckpoints(ctx, []core.CheckpointID{leaf}, true)
		return err
	})
	const left = `SELECT count(*) FROM checkpoints WHERE id LIKE 'path%' AND NOT pruned`
	n := d.number(left)
	if n == 0 || n > long-2000 {
		t.Errorf("%d of %d are shown after one transaction", n, long)
	}
	for range 3 { // rounds of the sweep
		for after := core.CheckpointID(""); ; {
			d.system(func(ctx context.Context, tx controller.AllTx) (err error) {
				after, err = tx.PruneDeleted(ctx, after, 2000)
				return err
			})
			if after == "" {
				break
			}
		}
	}
	if n := d.number(left); n != 0 {
		t.Errorf("%d are shown after three sweeps", n)
	}
}
