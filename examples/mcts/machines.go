package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
	"github.com/coppice-dev/coppice/sdk/go/search"
)

// How long a machine may take for one action, in milliseconds; an emulated CPU is slow.
const actionTimeoutMS = 120_000

// Machines is a World whose nodes are checkpoints and whose rollouts are forks.
type Machines struct {
	Client *coppice.Client
	Labels coppice.Labels // on everything it makes
	Spread bool           // children are grown on all runners

	mu     sync.Mutex
	keepMu sync.Mutex
	forks  int
	on     map[string]int // forks on each runner
	// What was measured, in milliseconds.
	createMS, pauseMS, readyMS, forkMS []float64
	seen                               []Identity
}

// child is one fork at work.
type child struct {
	workspace coppice.Workspace
	action    Action
	outcome   Outcome
	err       error
}

// Expand forks the checkpoint once for each action, in one call, and does the actions at once.
func (m *Machines) Expand(ctx context.Context, from string, actions []Action, keep func(Observation) bool) ([]Outcome, error) {
	fork, err := m.fork(ctx, from, len(actions))
	if err != nil {
		return nil, err
	}
	children := make([]child, len(actions))
	var wg sync.WaitGroup
	for i, c := range fork.Children {
		children[i] = child{workspace: *c.Workspace, action: actions[i]}
		wg.Go(func() { children[i].err = m.rollout(ctx, &children[i], keep) })
	}
	wg.Wait()
	out := make([]Outcome, len(children))
	var errs []error
	for i := range children {
		out[i] = children[i].outcome
		errs = append(errs, children[i].err)
	}
	return out, errors.Join(errs...)
}

// fork grows children of a checkpoint. Where they are spread it waits first until the checkpoint is sealed: other runners get it from the store.
func (m *Machines) fork(ctx context.Context, from string, n int) (coppice.ForkResult, error) {
	if m.Spread {
		cp, err := m.Client.WaitSealed(ctx, from)
		if err == nil && cp.State != coppice.CheckpointSealed {
			err = fmt.Errorf("it is %s", cp.State)
		}
		if err != nil {
			return coppice.ForkResult{}, fmt.Errorf("wait until checkpoint %s is sealed: %w", from, err)
		}
	}
	began := time.Now()
	fork, err := m.Client.ForkCheckpoint(ctx, from, coppice.ForkCheckpointRequest{Count: &n, AllOrNothing: true, Spread: m.Spread, Labels: m.Labels})
	if err != nil {
		return fork, fmt.Errorf("fork %s into %d: %w", from, n, err)
	}
	m.measureFork(time.Since(began), fork)
	return fork, nil
}

// rollout does one action in its fork, keeps the result as a checkpoint if it is new, and takes the fork down.
func (m *Machines) rollout(ctx context.Context, c *child, keep func(Observation) bool) (err error) {
	defer func() { err = errors.Join(err, m.terminate(ctx, c.workspace.ID)) }()
	seen, refused, err := m.do(ctx, c.workspace.ID, c.action.Command)
	if err != nil {
		return fmt.Errorf("action %s: %w", c.action.Name, err)
	}
	if refused != "" {
		c.outcome = Outcome{Refused: refused}
		return nil
	}
	c.outcome = Outcome{Seen: &seen}
	m.keepMu.Lock()
	kept := keep(seen)
	m.keepMu.Unlock()
	if !kept {
		return nil
	}
	annotations, err := m.Records().Annotations(c.action.Name, search.Outcome{Value: seen.Share()})
	if err != nil {
		return err
	}
	c.outcome.Node, err = m.Checkpoint(ctx, c.workspace.ID, annotations)
	return err
}

// Records is where the search keeps what it knows: in the checkpoints' annotations.
func (m *Machines) Records() search.Checkpoints { return search.Checkpoints{Client: m.Client} }

// do runs a command that ends by printing an observation. A command that fails did not apply.
func (m *Machines) do(ctx context.Context, id coppice.WorkspaceID, command []string) (o Observation, refused string, err error) {
	res, err := m.Client.Exec(ctx, id, coppice.ExecRequest{Command: command, TimeoutMS: actionTimeoutMS})
	if err != nil {
		return o, "", err
	}
	stdout, stderr, err := res.Output()
	if err != nil {
		return o, "", err
	}
	if res.TimedOut {
		return o, "", fmt.Errorf("the command took more than %d s", actionTimeoutMS/1000)
	}
	if res.ExitCode != 0 {
		return o, fmt.Sprintf("status %d: %s", res.ExitCode, strings.TrimSpace(string(stderr)+string(stdout))), nil
	}
	if err := json.Unmarshal(stdout, &o); err != nil {
		return o, "", fmt.Errorf("decode the observation: %w", err)
	}
	m.mu.Lock()
	m.seen = append(m.seen, o.Identity)
	m.mu.Unlock()
	return o, "", nil
}

// Checkpoint captures a machine as a node.
func (m *Machines) Checkpoint(ctx context.Context, id coppice.WorkspaceID, annotations coppice.Annotations) (string, error) {
	cp, err := m.Client.CreateCheckpoint(ctx, id, coppice.CreateCheckpointRequest{Labels: m.Labels, Annotations: annotations})
	if err != nil {
		return "", fmt.Errorf("checkpoint %s: %w", id, err)
	}
	m.mu.Lock()
	m.pauseMS = append(m.pauseMS, cp.PauseMS)
	m.mu.Unlock()
	return cp.ID, nil
}

// Create makes a workspace from an image and measures how long that takes.
func (m *Machines) Create(ctx context.Context, image string, measure bool) (coppice.Workspace, error) {
	began := time.Now()
	ws, err := m.Client.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{Image: image, Labels: m.Labels})
	if err != nil {
		return ws, fmt.Errorf("create a workspace from image %q: %w", image, err)
	}
	if measure {
		m.mu.Lock()
		m.createMS = append(m.createMS, milliseconds(time.Since(began)))
		m.mu.Unlock()
	}
	return ws, nil
}

// Siblings forks a checkpoint n times and asks each fork's bench who it is.
func (m *Machines) Siblings(ctx context.Context, from string, n int) (identities []Identity, err error) {
	fork, err := m.fork(ctx, from, n)
	if err != nil {
		return nil, err
	}
	identities = make([]Identity, n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i, c := range fork.Children {
		wg.Go(func() {
			o, refused, err := m.do(ctx, c.Workspace.ID, shell("exec "+step("")))
			if refused != "" {
				err = errors.New(refused)
			}
			identities[i], errs[i] = o.Identity, errors.Join(err, m.terminate(ctx, c.Workspace.ID))
		})
	}
	wg.Wait()
	return identities, errors.Join(errs...)
}

// terminate takes a workspace down, also when the search was given up.
func (m *Machines) terminate(ctx context.Context, id coppice.WorkspaceID) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	_, err := m.Client.TerminateWorkspace(ctx, id)
	return err
}

// Clear takes down whatever runs under the search's labels, and says how much that was.
func (m *Machines) Clear(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	var labels []string
	for k, v := range m.Labels {
		labels = append(labels, k+"="+v)
	}
	left, err := coppice.Collect(m.Client.Workspaces(ctx, coppice.WorkspaceFilter{Labels: labels}))
	errs := []error{err}
	for _, ws := range left {
		errs = append(errs, m.terminate(ctx, ws.ID))
	}
	return len(left), errors.Join(errs...)
}

func (m *Machines) measureFork(wall time.Duration, fork coppice.ForkResult) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forks += len(fork.Children)
	m.forkMS = append(m.forkMS, milliseconds(wall))
	if m.on == nil {
		m.on = make(map[string]int)
	}
	for _, c := range fork.Children {
		m.on[c.Workspace.RunnerID]++
		m.readyMS = append(m.readyMS, milliseconds(c.Workspace.ReadyAt.Sub(c.Workspace.CreatedAt)))
	}
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
