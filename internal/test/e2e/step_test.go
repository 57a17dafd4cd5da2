package e2e

import (
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestStep tries actions from a checkpoint on real machines, and forks what one of them left.
func TestStep(t *testing.T) {
	s := theStack(t)
	ctx := t.Context()
	root := seed(t)
	req := coppice.StepRequest{Parallel: 2, Actions: []coppice.StepAction{
		{
			Files:   []coppice.StepFile{{Path: "/root/step/tried", Content: "by the action\n", Mode: "0600"}},
			Command: []string{"sh", "-c", `cat /root/step/tried; echo '{"score": 0.9}'`}, OnlyIf: coppice.StepCondition{MinScore: new(0.5)},
		},
		{Command: []string{"sh", "-c", "echo bad >&2; exit 4"}, OnlyIf: coppice.StepCondition{ExitCode: new(0)}},
		{Command: []string{"no-such-program"}},
	}}
	got := map[int]coppice.StepActionResult{}
	operation := ""
	for e, err := range s.client.StreamStep(ctx, root, req) {
		if err != nil {
			t.Fatal(err)
		}
		operation = e.OperationID
		if e.Action != nil {
			got[e.Action.Index] = *e.Action
		}
	}
	kept, dropped, failed := got[0], got[1], got[2]
	if len(got) != 3 || kept.Kept != coppice.KeepCheckpoint || kept.Problem != nil || kept.Score == nil || *kept.Score != 0.9 || kept.Stdout != "by the action\n{\"score\": 0.9}\n" {
		t.Fatalf("%+v", got)
	}
	if dropped.Kept != coppice.KeepNothing || dropped.ExitCode == nil || *dropped.ExitCode != 4 || dropped.Stderr != "bad\n" || dropped.Problem != nil {
		t.Errorf("%+v", dropped)
	}
	if failed.Kept != coppice.KeepNothing || failed.Problem == nil || failed.Problem.Code != "COMMAND_NOT_FOUND" {
		t.Errorf("%+v", failed)
	}
	for _, r := range got {
		ws, err := s.client.Workspace(ctx, r.WorkspaceID)
		if err != nil || ws.State != coppice.WorkspaceTerminated {
			t.Errorf("action %d: its workspace is %s, %v", r.Index, ws.State, err)
		}
	}
	node, err := s.client.Checkpoint(ctx, kept.CheckpointID)
	if err != nil || node.ParentID != root {
		t.Fatalf("%+v, %v", node, err)
	}
	said, _ := node.Annotations["coppice.step/v1"].(map[string]any)
	if said["operation_id"] != operation || said["action"] != 0.0 || said["score"] != 0.9 {
		t.Errorf("%v", node.Annotations)
	}
	ws := forkOne(t, s, node.ID)
	out, err := s.client.Exec(ctx, ws, coppice.ExecRequest{Command: []string{"cat", "/root/step/tried"}})
	if err != nil || out.Stdout != "by the action\n" {
		t.Errorf("%+v, %v", out, err)
	}
}

// TestStepOverParts logs how long a step of four actions takes, and the same by separate calls. It is a measurement: make test-long has it.
func TestStepOverParts(t *testing.T) {
	if !*long {
		return
	}
	s := theStack(t)
	ctx := t.Context()
	root := seed(t)
	const actions = 4
	command := []string{"sh", "-c", "cat /root/in"}
	action := coppice.StepAction{Files: []coppice.StepFile{{Path: "/root/in", Content: "x"}}, Command: command}
	step := func() time.Duration {
		began := time.Now()
		res, err := s.client.Step(ctx, root, coppice.StepRequest{Actions: slices.Repeat([]coppice.StepAction{action}, actions)})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range res.Actions {
			if r.Kept != coppice.KeepCheckpoint || r.Stdout != "x" {
				t.Fatalf("%+v", r)
			}
		}
		return time.Since(began)
	}
	after := func(ws coppice.WorkspaceID) error {
		_, err := s.client.WriteFile(ctx, ws, "/root/in", strings.NewReader("x"), coppice.WriteOptions{})
		if err == nil {
			_, err = s.client.Exec(ctx, ws, coppice.ExecRequest{Command: command})
		}
		if err == nil {
			_, err = s.client.CreateCheckpoint(ctx, ws, coppice.CreateCheckpointRequest{})
		}
		if err == nil {
			_, err = s.client.TerminateWorkspace(ctx, ws)
		}
		return err
	}
	parts := func(together bool) time.Duration {
		began := time.Now()
		if !together {
			for range actions {
				res, err := s.client.ForkCheckpoint(ctx, root, coppice.ForkCheckpointRequest{})
				if err == nil {
					err = after(res.Children[0].Workspace.ID)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			return time.Since(began)
		}
		res, err := s.client.ForkCheckpoint(ctx, root, coppice.ForkCheckpointRequest{Count: new(actions)})
		if err != nil {
			t.Fatal(err)
		}
		var group errgroup.Group
		for _, child := range res.Children {
			group.Go(func() error { return after(child.Workspace.ID) })
		}
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
		return time.Since(began)
	}
	step() // the first pays for what is shared
	for range 3 {
		t.Logf("a step of %d actions took %s; one after the other by separate calls %s; with one fork, at the same time %s", actions, step(), parts(false), parts(true))
	}
}
