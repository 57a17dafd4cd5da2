package e2e

import (
	"fmt"
	"slices"
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// content is what is written into the guest before the first checkpoint and by nobody after it: on the disk, and in memory.
const (
	writeContent = "for f in /root/data /dev/shm/data; do head -c 3000000 /dev/urandom > $f; sha256sum $f >> /root/sum; done"
	sameContent  = "/root/data: OK\n/dev/shm/data: OK\n"
)

// grown is a checkpoint and the way of the witness in it.
type grown struct {
	id   coppice.CheckpointID
	path []string
}

// TestPoolOfFour grows a tree on one host and forks it on two, then on four, each time one child on each: with the processes alive, every
// byte of the checkpoints on every host as it was, and what nobody wrote as it was in the guests. What grows elsewhere is
// forked on all of them again, on the first one too.
func TestPoolOfFour(t *testing.T) {
	if !*long {
		return // four hosts take minutes, and TestPool has two: make test-long
	}
	p := newPool(t)
	home := p.join()
	s := home.stack
	ws, first := p.parent(s, writeContent)
	root := grown{id: checkpoint(t, s, ws.ID).ID}
	branch := func(parent grown, ws coppice.WorkspaceID, label string) grown {
		g := grown{path: append(slices.Clip(parent.path), label)}
		compare(t, "before a checkpoint", after(first, g.path...), step(t, s, ws, label))
		g.id = checkpoint(t, s, ws).ID
		p.sealed(t, g.id)
		return g
	}
	other := forkOne(t, s, root.id)
	right := branch(root, other, "right")
	left := branch(root, ws.ID, "left")
	deep := branch(left, ws.ID, "deep")
	for _, id := range []coppice.WorkspaceID{ws.ID, other} {
		terminate(t, s, id)
	}
	p.join()
	p.everywhere(t, first, right)
	p.join()
	p.join()
	children := p.everywhere(t, first, deep)
	away := children[len(children)-1]
	label := fmt.Sprint(len(children) - 1) // what everywhere has made it do
	next := branch(grown{path: append(deep.path, label)}, away, "away")
	p.everywhere(t, first, next)
}

// everywhere forks a checkpoint once on each host and looks at every child, which then goes a step on: its number.
func (p *pool) everywhere(t *testing.T, first sight, g grown) (children []coppice.WorkspaceID) {
	t.Helper()
	on := map[coppice.RunnerID]int{}
	for i, c := range fork(t, p.hosts[0].stack, g.id, coppiceFork{count: len(p.hosts), spread: true}) {
		id := c.Workspace.ID
		on[c.Workspace.RunnerID]++
		children = append(children, id)
		where := fmt.Sprintf("child %d of %d", i, len(p.hosts))
		compare(t, where, after(first, g.path...), look(t, p.hosts[0].stack, id))
		if got := execute(t, p.hosts[0].stack, id, "sha256sum", "-c", "/root/sum"); got != sameContent {
			t.Errorf("%s has %q", where, got)
		}
		own := append(slices.Clip(g.path), fmt.Sprint(i))
		compare(t, where+", a step on", after(first, own...), step(t, p.hosts[0].stack, id, fmt.Sprint(i)))
	}
	for _, h := range p.hosts {
		if on[h.ID] != 1 {
			t.Errorf("%d children are on %s, want one", on[h.ID], h.Name)
		}
	}
	for _, h := range p.hosts[1:] {
		sameBytes(t, p.hosts[0], h, g.id)
	}
	return children
}
