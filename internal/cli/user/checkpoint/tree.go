package checkpoint

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/find"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func newTreeCommand(a *cli.App) *cobra.Command {
	var depth int
	c := &cobra.Command{
		Use:   "tree [CHECKPOINT|WORKSPACE]",
		Short: "Draw the tree of checkpoints and their live workspaces",
		Long: `Draw the tree below a checkpoint; for a workspace, the whole tree that it belongs to; without an argument, every tree.

Each node shows the numbers among its annotations (score, visits, ...). "!N outside" is the number of requests since its parent that may have
changed something outside: see coppice ckpt effects.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.Client()
			if err != nil {
				return err
			}
			roots, err := treeRoots(c.Context(), client, args)
			if err != nil {
				return err
			}
			trees := [][]coppice.TreeNode{}
			for _, root := range roots {
				nodes, err := coppice.Collect(client.Tree(c.Context(), root, depth))
				if err != nil {
					return err
				}
				trees = append(trees, nodes)
			}
			return a.Print(trees, func(w io.Writer) error { return printTrees(w, time.Now(), trees) })
		},
	}
	c.Flags().IntVar(&depth, "depth", -1, "how many `generations` to show; -1 is all")
	return c
}

// treeRoots returns the roots of the trees that a person wants to see.
func treeRoots(ctx context.Context, client *coppice.Client, args []string) ([]coppice.CheckpointID, error) {
	if len(args) == 0 {
		templates, err := coppice.Collect(client.Checkpoints(ctx, coppice.CheckpointFilter{Kind: coppice.CheckpointKindTemplate}))
		if err != nil {
			return nil, err
		}
		var ids []coppice.CheckpointID
		for _, cp := range slices.Backward(templates) {
			ids = append(ids, cp.ID)
		}
		return ids, nil
	}
	ws, cp, err := find.Node(ctx, client, args[0])
	if err != nil {
		return nil, err
	}
	if cp != nil {
		return []coppice.CheckpointID{cp.ID}, nil
	}
	lineage, err := coppice.Collect(client.Lineage(ctx, ws.CheckpointID))
	if err != nil || len(lineage) == 0 {
		return nil, err
	}
	return []coppice.CheckpointID{lineage[len(lineage)-1].ID}, nil
}

func printTrees(w io.Writer, now time.Time, trees [][]coppice.TreeNode) error {
	if len(trees) == 0 {
		_, err := fmt.Fprintln(w, "No checkpoints. The first workspace of an image makes the root of a tree: coppice ws create")
		return err
	}
	for i, nodes := range trees {
		if i > 0 {
			fmt.Fprintln(w)
		}
		if err := printTree(w, now, nodes); err != nil {
			return err
		}
	}
	return nil
}

// treeLine is a node or a workspace, drawn.
type treeLine struct{ branch, name, rest string }

// printTree draws nodes, which come parents first, with their columns aligned.
func printTree(w io.Writer, now time.Time, nodes []coppice.TreeNode) error {
	if len(nodes) == 0 {
		return nil
	}
	children := map[coppice.CheckpointID][]coppice.TreeNode{}
	for _, n := range nodes[1:] {
		children[n.Checkpoint.ParentID] = append(children[n.Checkpoint.ParentID], n)
	}
	var lines []treeLine
	var draw func(n coppice.TreeNode, first, rest string)
	draw = func(n coppice.TreeNode, first, rest string) {
		lines = append(lines, treeLine{first, nodeName(n.Checkpoint), nodeFacts(now, n)})
		below := children[n.Checkpoint.ID]
		for i, ws := range n.Workspaces {
			branch := "├╴"
			if i == len(n.Workspaces)-1 && len(below) == 0 {
				branch = "└╴"
			}
			lines = append(lines, treeLine{rest + branch, "▸ " + ws.Name, fmt.Sprintf("%s  %s  %s", ws.State, render.Age(now, ws.CreatedAt), render.Short(ws.ID))})
		}
		for i, child := range below {
			if i == len(below)-1 {
				draw(child, rest+"└─", rest+"  ")
			} else {
				draw(child, rest+"├─", rest+"│ ")
			}
		}
	}
	draw(nodes[0], "", "")
	width := 0
	for _, l := range lines {
		width = max(width, utf8.RuneCountInString(l.branch+l.name))
	}
	for _, l := range lines {
		pad := strings.Repeat(" ", width-utf8.RuneCountInString(l.branch+l.name))
		if _, err := fmt.Fprintf(w, "%s%s%s  %s\n", l.branch, l.name, pad, l.rest); err != nil {
			return err
		}
	}
	return nil
}

func nodeName(cp coppice.Checkpoint) string {
	name := "● " + render.Short(cp.ID)
	switch {
	case cp.State == coppice.CheckpointDeleted:
		name = "○ " + render.Short(cp.ID)
	case cp.Kind == coppice.CheckpointKindTemplate:
		name += " image " + cp.Image.Name
	}
	if cp.Name != "" {
		name += " " + cp.Name
	}
	return foreign.Visible(name)
}

func nodeFacts(now time.Time, n coppice.TreeNode) string {
	cp := n.Checkpoint
	words := []string{string(cp.State), render.Age(now, cp.CreatedAt)}
	if cp.State != coppice.CheckpointDeleted {
		words = append(words, render.Size(cp.DeltaBytes))
	}
	if n.EffectsCount > 0 { // a new fork of its parent does not undo what happened outside
		words = append(words, fmt.Sprintf("!%d outside", n.EffectsCount))
	}
	var keys []string
	for k := range cp.Annotations {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		switch v := cp.Annotations[k].(type) {
		case float64:
			words = append(words, fmt.Sprintf("%s %.4g", k, v))
		case string:
			if len(v) <= 40 {
				words = append(words, k+" "+v)
			}
		}
	}
	return foreign.Visible(strings.Join(words, "  "))
}
