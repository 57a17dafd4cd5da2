package mcp

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

type treeIn struct {
	Of       string `json:"of,omitempty" jsonschema:"id or name of a checkpoint, for what is below it, or of a workspace, for the whole tree that it is in; every tree of the project if absent" length:"1,64"`
	Depth    int    `json:"depth,omitempty" jsonschema:"how many generations to show; all if absent" range:"1,1000000"`
	MaxNodes int    `json:"max_nodes,omitempty" jsonschema:"how many checkpoints to show" range:"1,1000" default:"200"`
}

type treeOut struct {
	Nodes []nodeView `json:"nodes" jsonschema:"parents come before their children"`
	More  bool       `json:"more,omitempty" jsonschema:"there are more nodes: call tree for one of these, or with more max_nodes"`
}

type nodeView struct {
	Checkpoint checkpointView    `json:"checkpoint"`
	Depth      int               `json:"depth" jsonschema:"generations below the root of this answer"`
	Effects    int               `json:"effects" jsonschema:"how much may have changed outside between its parent and it"`
	Workspaces []nodeOfWorkspace `json:"workspaces" jsonschema:"live workspaces that stand on it"`
}

type nodeOfWorkspace struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	State string `json:"state"`
}

func (r *registry) addTreeTools() {
	add(r, tool{
		name: "tree", title: "Show the tree of checkpoints", kind: reads,
		about: "Show which checkpoint descends from which, with scores and other annotations, and the workspaces that stand on them.",
	}, r.tree)
}

func (r *registry) tree(ctx context.Context, in treeIn) (treeOut, string, error) {
	roots, err := r.roots(ctx, in.Of)
	if err != nil {
		return treeOut{}, "", err
	}
	depth := -1
	if in.Depth > 0 {
		depth = in.Depth
	}
	out := treeOut{Nodes: []nodeView{}}
	var b strings.Builder
	for _, root := range roots {
		if len(out.Nodes) == in.MaxNodes {
			out.More = true
			break
		}
		nodes, more, err := take(r.client.Tree(ctx, root, depth), 0, in.MaxNodes-len(out.Nodes))
		if err != nil {
			return treeOut{}, "", err
		}
		views := []nodeView{}
		for _, n := range nodes {
			views = append(views, viewNode(n))
		}
		out.Nodes = append(out.Nodes, views...)
		out.More = out.More || more
		b.WriteString(drawTree(views))
	}
	switch {
	case len(out.Nodes) == 0:
		b.WriteString("There are no checkpoints yet. workspace_create makes the root of a tree.\n")
	case out.More:
		fmt.Fprintf(&b, "There are more than these %d: tree with one of them in of, or with more max_nodes.\n", len(out.Nodes))
	}
	return out, b.String(), nil
}

// roots returns the nodes that a tree is drawn from.
func (r *registry) roots(ctx context.Context, of string) ([]coppice.CheckpointID, error) {
	if of == "" {
		const most = 1000 // as many nodes as an answer may have
		templates, _, err := take(r.client.Checkpoints(ctx, coppice.CheckpointFilter{Kind: coppice.CheckpointKindTemplate}), 0, most)
		var ids []coppice.CheckpointID
		for _, cp := range templates {
			ids = append(ids, cp.ID)
		}
		return ids, err
	}
	ws, cp, err := r.node(ctx, of)
	if err != nil || ws == nil {
		return []coppice.CheckpointID{cp}, err
	}
	if ws.CheckpointID == "" {
		return nil, &fault{code: string(coppice.CodeWorkspaceNotReady), detail: "the workspace " + ws.ID + " stands on no checkpoint yet"}
	}
	root := ws.CheckpointID
	for ancestor, err := range r.client.Lineage(ctx, ws.CheckpointID) {
		if err != nil {
			return nil, err
		}
		root = ancestor.ID
	}
	return []coppice.CheckpointID{root}, nil
}

func viewNode(n coppice.TreeNode) nodeView {
	v := nodeView{Checkpoint: viewCheckpoint(n.Checkpoint), Depth: n.Depth, Effects: n.EffectsCount, Workspaces: []nodeOfWorkspace{}}
	for _, ws := range n.Workspaces {
		v.Workspaces = append(v.Workspaces, nodeOfWorkspace{ID: ws.ID, Name: ws.Name, State: string(ws.State)})
	}
	return v
}

// drawTree draws nodes, which come parents first, each on a line of its own below its parent.
func drawTree(nodes []nodeView) string {
	if len(nodes) == 0 {
		return ""
	}
	children := map[string][]nodeView{}
	for _, n := range nodes[1:] {
		children[n.Checkpoint.Parent] = append(children[n.Checkpoint.Parent], n)
	}
	var b strings.Builder
	type entry struct {
		node   nodeView
		indent int
	}
	for stack := []entry{{nodes[0], 0}}; len(stack) > 0; {
		e := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		indent := strings.Repeat("  ", min(e.indent, 100))
		fmt.Fprintf(&b, "%s● %s", indent, e.node.Checkpoint.line())
		if e.node.Effects > 0 {
			fmt.Fprintf(&b, ", !%d outside", e.node.Effects)
		}
		b.WriteString("\n")
		for _, ws := range e.node.Workspaces {
			fmt.Fprintf(&b, "%s  ▸ %s %s: %s\n", indent, ws.ID, ws.Name, ws.State)
		}
		for _, child := range slices.Backward(children[e.node.Checkpoint.ID]) {
			stack = append(stack, entry{child, e.indent + 1})
		}
		delete(children, e.node.Checkpoint.ID) // so that every node is drawn once, whatever the parents are
	}
	return b.String()
}

// maxFact bounds a text among the annotations that a line shows, in bytes, and maxFacts their number.
const (
	maxFact  = 40
	maxFacts = 8
)

// facts are the numbers and short texts among annotations.
func facts(annotations map[string]any) string {
	var words []string
	for _, k := range slices.Sorted(maps.Keys(annotations)) {
		switch v := annotations[k].(type) {
		case float64:
			words = append(words, fmt.Sprintf("%s %.4g", visible(k), v))
		case string:
			words = append(words, visible(k)+" "+visible(clip(v, maxFact)))
		}
		if len(words) == maxFacts {
			break
		}
	}
	if len(words) == 0 {
		return ""
	}
	return " [" + strings.Join(words, ", ") + "]"
}
