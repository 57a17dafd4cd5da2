package httpapi

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/core"
)

// journal is the part of the journal of egress that the public API shows.
type journal interface {
	List(ctx context.Context, project core.ProjectID, id core.WorkspaceID, f flows.Filter) ([]flows.Flow, error)
	Omitted(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (flows.Omitted, error)
	Effects(ctx context.Context, project core.ProjectID, id core.CheckpointID, after flows.EffectMark, limit int) ([]flows.Effect, error)
}

// ListEgress serves GET /v1/workspaces/{id}/egress.
func (s *server) ListEgress(ctx context.Context, r api.ListEgressRequestObject) (api.ListEgressResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	after, err := parseFlowKey(p.After)
	if err != nil {
		return nil, err
	}
	f := flows.Filter{After: after, Limit: p.Limit, Outcome: core.Outcome(r.Params.Outcome), Host: r.Params.Host}
	list, err := s.flows.List(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), f)
	if err != nil {
		return nil, err
	}
	omitted, err := s.flows.Omitted(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID))
	if err != nil {
		return nil, err
	}
	list, next := cut(list, p, func(f flows.Flow) string { return flowKey(f.At, f.ID) })
	out := api.ListEgress200JSONResponse{Items: convert(list, flowOf), NextCursor: next}
	if omitted.Count > 0 {
		out.Omitted = &api.OmittedFlows{Count: omitted.Count, FirstAt: omitted.First, LastAt: omitted.Last}
	}
	return out, nil
}

// ListEffects serves GET /v1/checkpoints/{id}/effects.
func (s *server) ListEffects(ctx context.Context, r api.ListEffectsRequestObject) (api.ListEffectsResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	depth, rest, err := parseTreeKey(p.After)
	if err != nil {
		return nil, err
	}
	after, err := parseFlowKey(rest)
	if err != nil {
		return nil, err
	}
	list, err := s.flows.Effects(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID), flows.EffectMark{Depth: depth, Mark: after}, p.Limit)
	if err != nil {
		return nil, err
	}
	list, next := cut(list, p, func(e flows.Effect) string { return strconv.Itoa(e.Depth) + ":" + flowKey(e.At, e.ID) })
	return api.ListEffects200JSONResponse{Items: convert(list, effectOf), NextCursor: next}, nil
}

// flowKey names a place in a list of flows: when and which.
func flowKey(at time.Time, id string) string { return strconv.FormatInt(at.UnixMicro(), 10) + ":" + id }

func parseFlowKey(key string) (flows.Mark, error) {
	if key == "" {
		return flows.Mark{}, nil
	}
	at, id, ok := strings.Cut(key, ":")
	micros, err := strconv.ParseInt(at, 10, 64)
	if err != nil || !ok || id == "" {
		return flows.Mark{}, badCursor()
	}
	return flows.Mark{At: time.UnixMicro(micros).UTC(), ID: id}, nil
}
