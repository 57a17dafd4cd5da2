package clitest

import "github.com/coppice-dev/coppice/api"

// SampleTree is a template with two branches, one of them over a deleted node, and live workspaces.
func SampleTree() *Server {
	f := &Server{}
	deleted := Checkpoint(3, 1, nil)
	deleted.State = api.CheckpointDeleted
	named := Checkpoint(2, 1, api.Annotations{"score": 0.98765, "visits": 12, "action": "edit", "list": []int{1}})
	named.Name = "before-upgrade"
	f.Checkpoints = []api.Checkpoint{
		Checkpoint(1, 0, nil), named, deleted,
		Checkpoint(4, 2, api.Annotations{"evil": "\x1b[2J"}), Checkpoint(5, 2, nil), Checkpoint(6, 3, nil),
	}
	at := func(n int, name string, head int) api.Workspace {
		ws := Workspace(n, name, api.WorkspaceReady)
		ws.CheckpointID = ID("ckpt", head)
		return ws
	}
	f.Workspaces = []api.Workspace{at(1, "demo", 2), at(2, "second", 5), at(3, "third", 5), at(4, "fourth", 6)}
	return f
}
