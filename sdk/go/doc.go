// Package coppice is the Go client of Coppice: running machines (workspaces), immutable checkpoints
// of them in a tree, and forks.
//
//	c, err := coppice.New(coppice.Config{Server: "unix:///run/coppice/api.sock", Token: token})
//	ws, err := c.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{Name: "root"})
//	res, err := c.Exec(ctx, ws.ID, coppice.ExecRequest{Command: []string{"uname", "-a"}})
//	node, err := c.CreateCheckpoint(ctx, ws.ID, coppice.CreateCheckpointRequest{})
//	fork, err := c.ForkCheckpoint(ctx, node.ID, coppice.ForkCheckpointRequest{Count: new(8)})
//
// # Waiting
//
// A call that starts an operation returns when the operation has ended, however long that takes;
// the context bounds it. If the context ends, the operation goes on, because it belongs to the
// server.
//
// # Errors
//
// A refusal of the server is an *Error with a stable code:
//
//	if errors.Is(err, coppice.CodeVersionConflict) { … }
//
// # Retries
//
// The client repeats a call a few times, with growing pauses, but only if that cannot do anything
// twice. It repeats reads and deletions after a lost connection or a 502, 503 or 504. It repeats
// other calls only if no connection could be made at all.
//
// # Searches
//
// Package search, below this one, has tree searches whose nodes are checkpoints: UCT, PUCT, best-of-N and beam search. Their
// statistics are annotations, changed by compare-and-set (PatchCheckpoint with a Version), so that programs share a tree.
//
// The types in types.gen.go are generated from api/openapi.yaml. A Client is safe for concurrent
// use.
package coppice
