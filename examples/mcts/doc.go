// Command mcts repairs a library by a search over running machines. It is a UCT tree search: its
// nodes are checkpoints and its rollouts are forks. It uses only Coppice's public REST API.
//
// The workspace holds toolz, a Python library that ships its tests, with an inserted regression
// that takes several edits to undo, and a test bench (puzzle/bench.py). The bench is a process that
// was started once. It keeps in memory which modules are loaded, what they bound, the journal of
// what was done and how many loads are left. An edit on disk has no effect until the bench loads
// it, and a restarted bench would know nothing. So the state of the game is the state of the
// machine, and only a fork of the machine can branch it.
//
//	policy.go    what may be tried: Policy, and a default one that reads the names of failing tests
//	search.go    the game as a problem of package search, which does the UCT. It knows no machines, only a World
//	machines.go  a World of Coppice workspaces and checkpoints
//	puzzle.go    the machine at the root: library, regression, bench
//	report.go    figures, the proof that siblings differ, the tree
package main
