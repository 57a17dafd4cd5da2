package httpapi

import (
	"context"
	"fmt"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi/stepjson"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
)

// StepCheckpoint serves POST /v1/checkpoints/{id}/step.
func (s *server) StepCheckpoint(ctx context.Context, r api.StepCheckpointRequestObject) (api.StepCheckpointResponseObject, error) {
	b := r.Body
	fork, err := forkIn(forkOptions{env: b.Env, labels: b.Labels, network: b.Network, ttl: b.TTLSeconds, grants: b.Grants})
	if err != nil {
		return nil, err
	}
	actions := make([]steps.Action, len(b.Actions))
	for i, a := range b.Actions {
		if actions[i], err = stepActionIn(fmt.Sprintf("actions.%d.", i), a); err != nil {
			return nil, err
		}
	}
	lines, wait := stepjson.InLines(ctx), waitOf(r.Params.Wait)
	if lines {
		wait = 0
	}
	begin := func() (controller.Answer, error) {
		return s.control.Step(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID), actions, b.Parallel, fork, wait)
	}
	if lines {
		stream, err := stepjson.Stream(ctx, s.control.Steps, projectOf(ctx), begin)
		if err != nil {
			return nil, err
		}
		stream.Within, stream.Alive, stream.Log = s.pace.write, s.pace.heartbeat, s.log
		return stream, nil
	}
	a, err := begin()
	return answered(a, err,
		func(op api.AcceptedJSONResponse) api.StepCheckpointResponseObject {
			return api.StepCheckpoint202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.StepCheckpointResponseObject {
			return api.StepCheckpoint200JSONResponse(stepjson.ResultOf(a.Operation, a.Result.Steps))
		})
}

// StepWorkspace serves POST /v1/workspaces/{id}/step.
func (s *server) StepWorkspace(ctx context.Context, r api.StepWorkspaceRequestObject) (api.StepWorkspaceResponseObject, error) {
	action, err := stepActionIn("", stepjson.Within(*r.Body))
	if err != nil {
		return nil, err
	}
	a, err := s.control.StepWorkspace(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), steps.When(r.Body.When), action, waitOf(r.Params.Wait))
	return answered(a, err,
		func(op api.AcceptedJSONResponse) api.StepWorkspaceResponseObject {
			return api.StepWorkspace202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.StepWorkspaceResponseObject {
			return api.StepWorkspace200JSONResponse(stepjson.OneOf(a.Operation, a.Result.Steps))
		})
}

func stepActionIn(field string, b api.StepAction) (steps.Action, error) {
	node, err := checkpointRequestIn(b.Checkpoint)
	if err != nil {
		return steps.Action{}, below(field+"checkpoint.", err)
	}
	a, exec, err := stepjson.ActionIn(field, b, invalid)
	a.Node = steps.Node{Name: node.Name, Labels: node.Labels, Annotations: node.Annotations, Pinned: node.Pinned, Prepare: node.Prepare}
	if err != nil || exec == nil {
		return a, err
	}
	command, _, err := execIn(*exec)
	a.Command = &command
	return a, below(field, err)
}

// withSteps adds what the actions of a step that failed, or was canceled, have left. A key that may not run commands sees nothing of what they wrote.
func (s *server) withSteps(ctx context.Context, a *controller.Answer) (err error) {
	if k := a.Operation.Kind; (k == controller.OpStepCheckpoint || k == controller.OpStepWorkspace) && a.Operation.Problem != nil {
		a.Result.Steps, err = s.control.Steps.Results(ctx, projectOf(ctx), a.Operation.ID)
	}
	if core.MissingScope(controller.KeyOf(ctx).Scopes, core.ScopeWorkspaceExec) != "" {
		a.Result.Steps = steps.WithoutOutput(a.Result.Steps)
	}
	return err
}
