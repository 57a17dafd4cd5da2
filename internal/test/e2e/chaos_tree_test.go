package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// tree is one search: what it was told of its checkpoints and workspaces. It does one thing at a time.
type tree struct {
	x        *chaos
	name     string
	rng      *rand.Rand
	seq      int
	root     coppice.CheckpointID // nodes[0]
	first    sight                // of the witness in it
	nodes    []*node              // nodes[0] may be another search's too
	branches []*branch            // thought to be alive

	forks, checkpoints, steps, restores, repeats, lost int
}

// node is a checkpoint that is known to be there, and what the witness has done in it.
type node struct {
	id   coppice.CheckpointID
	path []string
}

type branch struct {
	id     coppice.WorkspaceID
	name   string
	runner coppice.RunnerID // which does not change: all checkpoints of a tree are there
	path   []string
}

const patience = 90 * time.Second // of one request, and of finding out what became of one

func (tr *tree) ctx() (context.Context, context.CancelFunc) {
	return context.WithTimeout(tr.x.t.Context(), patience)
}

// grow works until ctx ends. What is under way then is brought to its end.
func (tr *tree) grow(ctx context.Context) {
	for ctx.Err() == nil {
		tr.seq++
		switch n := tr.rng.IntN(10); {
		case len(tr.branches) == 0 || n < 2 && len(tr.branches) < chaosBranches:
			tr.fork()
		case n < 6:
			tr.step(tr.pick())
		case n < 8:
			if len(tr.nodes) < chaosNodes {
				tr.capture(tr.pick())
			} else {
				tr.remove(1 + tr.rng.IntN(len(tr.nodes)-1))
			}
		case n < 9:
			tr.restore(tr.pick(), tr.nodes[tr.rng.IntN(len(tr.nodes))])
		case len(tr.branches) > 1:
			tr.terminate(tr.pick())
		}
	}
}

// client is that of one of the controllers.
func (tr *tree) client() *coppice.Client { return tr.x.any(tr.rng) }

func (tr *tree) note(what, object string, err error) {
	tr.x.note(event{Who: tr.name, What: what, Object: object, Outcome: outcome(err)})
}

// insist makes a request that makes something. Now and then it hangs up in the middle and repeats it under the same idempotency key, at
// whichever controller; whatever answers it gets must be of one and the same operation.
func insist[T any](ctx context.Context, tr *tree, what string, call func(ctx context.Context, c *coppice.Client) (T, error), operation func(T) coppice.OperationID) (T, error) {
	key := fmt.Sprintf("%s-%d-%s", tr.name, tr.seq, what)
	ctx = coppice.WithIdempotencyKey(ctx, key)
	do := func(ctx context.Context) (T, error) {
		res, err := call(ctx, tr.client())
		var told string
		var refused *coppice.Error
		switch {
		case err == nil:
			told = "succeeded as " + operation(res)
		case errors.As(err, &refused) && refused.OperationID != "" && refused.Code != coppice.CodeDatabaseUnavailable:
			told = "failed as " + refused.OperationID
		default:
			return res, err
		}
		tr.x.mu.Lock()
		defer tr.x.mu.Unlock()
		if before := tr.x.results[key]; before != "" && before != told {
			tr.x.t.Errorf("%s: the request with key %s %s, and then %s", tr.name, key, before, told)
		}
		tr.x.results[key] = told
		return res, err
	}
	for tr.rng.IntN(4) == 0 {
		short, cancel := context.WithTimeout(ctx, between(tr.rng, time.Millisecond, 1500*time.Millisecond))
		_, err := do(short)
		cancel()
		tr.repeats++
		tr.x.note(event{Who: tr.name, What: what + ", first try", Key: key, Outcome: outcome(err)})
	}
	return do(ctx)
}

func (tr *tree) pick() *branch { return tr.branches[tr.rng.IntN(len(tr.branches))] }

func (tr *tree) fail(format string, args ...any) {
	text := fmt.Sprintf(tr.name+": "+format, args...)
	tr.x.note(event{Who: tr.name, What: "wrong", Outcome: text})
	tr.x.t.Error(text)
}

func (tr *tree) fork() {
	from, count := tr.nodes[tr.rng.IntN(len(tr.nodes))], 1+tr.rng.IntN(2)
	name := fmt.Sprintf("%s-%d", tr.name, tr.seq)
	ctx, cancel := tr.ctx()
	defer cancel()
	res, err := insist(ctx, tr, "fork", func(ctx context.Context, c *coppice.Client) (coppice.ForkResult, error) {
		return c.ForkCheckpoint(ctx, from.id, coppice.ForkCheckpointRequest{Count: &count, BranchName: name})
	}, func(r coppice.ForkResult) coppice.OperationID { return r.OperationID })
	tr.note("fork "+from.id, name, err)
	if err == nil {
		for _, c := range res.Children {
			if c.Problem == nil {
				tr.adopt(*c.Workspace, from)
			} else {
				tr.x.note(event{Who: tr.name, What: "child", Object: name, Outcome: c.Problem.Code + ": " + c.Problem.Message})
			}
		}
		return
	}
	for i := range count {
		child := name // of an only one
		if count > 1 {
			child = fmt.Sprintf("%s-%d", name, i+1)
		}
		for _, w := range tr.settled(child) {
			if w.State != coppice.WorkspaceReady {
				continue
			}
			if errors.Is(err, coppice.CodeForkFailed) {
				tr.fail("%s is ready, and its fork was said to have failed: %v", child, err)
			}
			tr.adopt(w, from)
		}
	}
}

// settled returns the workspaces of a name once none is on its way.
func (tr *tree) settled(name string) (found []coppice.Workspace) {
	tr.await("what became of "+name, func(ctx context.Context) (bool, error) {
		var err error
		found, err = coppice.Collect(tr.client().Workspaces(ctx, coppice.WorkspaceFilter{Name: name}))
		return !slices.ContainsFunc(found, moving), err
	})
	return found
}

func moving(w coppice.Workspace) bool {
	return !slices.Contains([]coppice.WorkspaceState{
		coppice.WorkspaceReady, coppice.WorkspaceSuspended, coppice.WorkspaceTerminated, coppice.WorkspaceFailed, coppice.WorkspaceLost,
	}, w.State)
}

// await asks until the answer is final. Errors are faults of the time: they pass.
func (tr *tree) await(what string, ask func(ctx context.Context) (bool, error)) {
	ctx, cancel := tr.ctx()
	defer cancel()
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for {
		done, err := ask(ctx)
		if done && err == nil {
			return
		}
		select {
		case <-ctx.Done():
			tr.fail("not known within %s: %s: %v", patience, what, err)
			return
		case <-again.C:
		}
	}
}

// adopt takes a new workspace into the tree and looks at it.
func (tr *tree) adopt(w coppice.Workspace, from *node) {
	b := &branch{id: w.ID, name: w.Name, runner: w.RunnerID, path: slices.Clone(from.path)}
	tr.branches = append(tr.branches, b)
	tr.forks++
	ctx, cancel := tr.ctx()
	defer cancel()
	res, err := tr.client().Exec(ctx, b.id, coppice.ExecRequest{Command: []string{"cat", "/proc/sys/kernel/random/uuid", "/etc/machine-id"}})
	if err != nil || res.ExitCode != 0 {
		tr.note("draw", b.name, err)
		tr.mourn(b)
		return
	}
	for i, value := range strings.Fields(res.Stdout) {
		tr.x.claim([]string{"random", "machine-id"}[i], value, b.name)
	}
	tr.look(b)
}

// ask asks the witness of a branch.
func (tr *tree) ask(ctx context.Context, b *branch, words ...string) (got sight, err error) {
	res, err := tr.client().Exec(ctx, b.id, coppice.ExecRequest{Command: append([]string{probePath, "ask", witnessPort}, words...)})
	if err != nil {
		return got, err
	}
	if res.ExitCode != 0 {
		return got, fmt.Errorf("exit status %d: %s", res.ExitCode, res.Stderr)
	}
	return got, json.Unmarshal([]byte(res.Stdout), &got)
}

func (tr *tree) look(b *branch) {
	ctx, cancel := tr.ctx()
	defer cancel()
	got, err := tr.ask(ctx, b, "look")
	if err != nil {
		tr.note("look", b.name, err)
		tr.mourn(b)
		return
	}
	tr.check(b, got)
}

func (tr *tree) check(b *branch, got sight) {
	if diff := tr.differs(b.path, got); diff != "" {
		tr.fail("%s has another state than its history (-want +got):\n%s", b.name, diff)
	}
}

func (tr *tree) differs(path []string, got sight) string {
	return cmp.Diff(after(tr.first, path...), got, cmpopts.IgnoreFields(sight{}, "Held", "Broken"), cmpopts.EquateEmpty())
}

// step makes the witness change its state.
func (tr *tree) step(b *branch) {
	label := fmt.Sprintf("%s.%d", tr.name, tr.seq)
	ctx, cancel := tr.ctx()
	defer cancel()
	got, err := tr.ask(ctx, b, "step", label)
	tr.note("step "+label, b.name, err)
	tr.steps++
	if err == nil {
		b.path = append(slices.Clone(b.path), label)
		tr.check(b, got)
		return
	}
	if !tr.mourn(b) {
		tr.settleStep(b, label)
	}
}

// settleStep finds out whether a step was made whose answer did not come.
func (tr *tree) settleStep(b *branch, label string) {
	var got sight
	gone := false
	tr.await("whether "+b.name+" made step "+label, func(ctx context.Context) (bool, error) {
		for session, err := range tr.client().Sessions(ctx, b.id) {
			switch {
			case err != nil && tr.dead(ctx, b):
				gone = true
				return true, nil
			case err != nil:
				return false, err
			case session.State == coppice.SessionRunning && slices.Contains(session.Command, "ask"):
				return false, nil // the step may be under way
			}
		}
		var err error
		got, err = tr.ask(ctx, b, "look")
		return err == nil, err
	})
	if gone {
		tr.mourn(b)
		return
	}
	if made := append(slices.Clone(b.path), label); tr.differs(made, got) == "" {
		b.path = made
		return
	}
	tr.check(b, got)
}

func (tr *tree) dead(ctx context.Context, b *branch) bool {
	w, err := tr.client().Workspace(ctx, b.id)
	return err == nil && (w.State == coppice.WorkspaceLost || w.State == coppice.WorkspaceFailed || w.State == coppice.WorkspaceTerminated)
}

// mourn looks whether a branch that did not answer is dead, and whether it had cause to be.
func (tr *tree) mourn(b *branch) bool {
	var w coppice.Workspace
	tr.await("whether "+b.name+" lives", func(ctx context.Context) (bool, error) {
		var err error
		w, err = tr.client().Workspace(ctx, b.id)
		return !moving(w), err
	})
	if w.State == coppice.WorkspaceReady || w.ID == "" {
		return false
	}
	tr.drop(b)
	tr.lost++
	why := "no cause"
	if w.Failure != nil {
		why = w.Failure.Code + ": " + w.Failure.Message
	}
	tr.x.note(event{Who: tr.name, What: "dead", Object: b.name, Outcome: string(w.State) + " " + why})
	if w.Failure == nil || !tr.x.excused(b, w) {
		tr.fail("%s is %s though nobody killed its machine: %s", b.name, w.State, why)
	}
	return true
}

// excused reports whether a machine had a cause to be lost: it was killed, or its runner was cut off for longer than its lease.
func (x *chaos) excused(b *branch, w coppice.Workspace) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Contains(x.doomed, w.ID) || slices.ContainsFunc(x.silences, func(s silence) bool {
		return s.runner == b.runner && !w.EndedAt.Before(s.from) && (s.to.IsZero() || w.EndedAt.Before(s.to.Add(convergence)))
	})
}

func (tr *tree) drop(b *branch) {
	tr.branches = slices.DeleteFunc(tr.branches, func(o *branch) bool { return o == b })
}

func (tr *tree) capture(b *branch) {
	name := fmt.Sprintf("%s-%d", tr.name, tr.seq)
	ctx, cancel := tr.ctx()
	defer cancel()
	ckpt, err := insist(ctx, tr, "checkpoint", func(ctx context.Context, c *coppice.Client) (coppice.Checkpoint, error) {
		return c.CreateCheckpoint(ctx, b.id, coppice.CreateCheckpointRequest{Name: name})
	}, func(c coppice.Checkpoint) coppice.OperationID { return c.OperationID })
	tr.note("checkpoint "+b.name, name, err)
	if err != nil {
		tr.await("what became of checkpoint "+name, func(ctx context.Context) (bool, error) {
			all, err := coppice.Collect(tr.client().Checkpoints(ctx, coppice.CheckpointFilter{Name: name, States: []coppice.CheckpointState{
				coppice.CheckpointCapturing, coppice.CheckpointCaptured, coppice.CheckpointSealed,
			}}))
			if err != nil || slices.ContainsFunc(all, func(c coppice.Checkpoint) bool { return c.State == coppice.CheckpointCapturing }) {
				return false, err
			}
			if len(all) > 0 {
				ckpt = all[0]
			}
			return true, nil
		})
	}
	if ckpt.ID != "" { // it was told of it, or has seen it in a list
		tr.x.acknowledge(ckpt.ID)
		tr.nodes = append(tr.nodes, &node{id: ckpt.ID, path: slices.Clone(b.path)})
		tr.checkpoints++
	}
	if err != nil {
		tr.mourn(b)
	}
}

func (tr *tree) restore(b *branch, to *node) {
	ctx, cancel := tr.ctx()
	defer cancel()
	before, err := tr.client().Workspace(ctx, b.id)
	if err != nil {
		return
	}
	_, err = insist(ctx, tr, "restore", func(ctx context.Context, c *coppice.Client) (coppice.RestoreResult, error) {
		return c.RestoreWorkspace(ctx, b.id, to.id)
	}, func(r coppice.RestoreResult) coppice.OperationID { return r.OperationID })
	tr.note("restore "+to.id, b.name, err)
	done := err == nil
	if err != nil {
		if tr.mourn(b) {
			return
		}
		tr.await("whether "+b.name+" was restored", func(ctx context.Context) (bool, error) {
			w, err := tr.client().Workspace(ctx, b.id)
			done = w.Epoch > before.Epoch
			return !moving(w), err
		})
	}
	if done {
		b.path = slices.Clone(to.path)
		tr.restores++
	}
	tr.look(b)
}

func (tr *tree) terminate(b *branch) {
	ctx, cancel := tr.ctx()
	defer cancel()
	_, err := tr.client().TerminateWorkspace(ctx, b.id)
	tr.note("terminate", b.name, err)
	if err == nil {
		tr.drop(b)
		return
	}
	var w coppice.Workspace
	tr.await("whether "+b.name+" is terminated", func(ctx context.Context) (bool, error) {
		var err error
		w, err = tr.client().Workspace(ctx, b.id)
		return !moving(w), err
	})
	if w.State != coppice.WorkspaceReady {
		tr.drop(b)
	}
}

func (tr *tree) remove(i int) {
	n := tr.nodes[i]
	ctx, cancel := tr.ctx()
	defer cancel()
	tr.x.forget(n.id)
	err := tr.client().DeleteCheckpoint(ctx, n.id)
	tr.note("delete", n.id, err)
	there := false
	if err != nil {
		tr.await("whether "+n.id+" is deleted", func(ctx context.Context) (bool, error) {
			c, err := tr.client().Checkpoint(ctx, n.id)
			if errors.Is(err, coppice.CodeCheckpointNotFound) {
				return true, nil
			}
			there = c.State == coppice.CheckpointCaptured || c.State == coppice.CheckpointSealed
			return true, err
		})
	}
	if !there {
		tr.nodes = slices.Delete(tr.nodes, i, i+1)
	}
}

// verify looks at every branch and at a fork of every checkpoint.
func (tr *tree) verify() {
	for _, b := range slices.Clone(tr.branches) {
		tr.look(b)
	}
	for i, n := range tr.nodes {
		ctx, cancel := tr.ctx()
		name := fmt.Sprintf("%s-verify-%d", tr.name, i)
		res, err := tr.client().RestoreCheckpoint(ctx, n.id, coppice.RestoreCheckpointRequest{WorkspaceName: name})
		cancel()
		if err != nil {
			tr.fail("checkpoint %s of which it was told cannot be restored: %v", n.id, err)
			continue
		}
		tr.adopt(res.Workspace, n)
		if last := len(tr.branches) - 1; last >= 0 && tr.branches[last].id == res.Workspace.ID {
			tr.terminate(tr.branches[last])
		} else {
			tr.fail("a fork of checkpoint %s died", n.id)
		}
	}
}

func outcome(err error) string {
	if err == nil {
		return "ok"
	}
	return err.Error()
}
