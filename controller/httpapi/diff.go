package httpapi

import (
	"context"
	"encoding/base64"
	"strings"
	"unicode/utf8"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// A cursor of a diff is a path of a guest's choice: any bytes.
func decodePathCursor(s string) ([]byte, error) {
	if s == "" {
		return nil, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(s)
	path, ok := strings.CutPrefix(string(b), cursorVersion)
	if err != nil || !ok || !strings.HasPrefix(path, "/") || strings.Contains(path, "\x00") {
		return nil, invalid("cursor", "it is not a next_cursor of this list")
	}
	return []byte(path), nil
}

// DiffCheckpoints serves GET /v1/checkpoints/{id}/diff.
func (s *server) DiffCheckpoints(ctx context.Context, r api.DiffCheckpointsRequestObject) (api.DiffCheckpointsResponseObject, error) {
	after, err := decodePathCursor(r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	p := controller.DiffPage{After: after, Limit: defaultLimit}
	if r.Params.Limit != nil {
		p.Limit = *r.Params.Limit
	}
	d, err := s.control.Tree.Diff(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID), core.CheckpointID(r.Params.To), p)
	if err != nil {
		return nil, err
	}
	out := api.DiffCheckpoints200JSONResponse{
		FromID: r.CheckpointID, ToID: r.Params.To, Items: convert(d.Files, fileChangeOf), FilesComplete: d.Complete, Unreadable: d.Unreadable,
		MemoryChangedBytes: d.MemoryBytes, IdentityUnknown: !d.IdentityComplete,
	}
	if len(d.Next) > 0 {
		out.NextCursor = encodeCursor(string(d.Next))
	}
	if d.Processes != nil {
		out.Processes = &api.ProcessChanges{
			Complete: d.Processes.Complete, Started: convert(d.Processes.Started, workloadProcessOf), Gone: convert(d.Processes.Gone, workloadProcessOf),
		}
	}
	return out, nil
}

func fileChangeOf(f runnerapi.FileChange) api.FileChange {
	out := api.FileChange{
		Path: strings.ToValidUTF8(string(f.Path), "\uFFFD"), Change: api.FileChangeChange(f.Change), Type: api.FileChangeType(f.Type),
		What:      convert(f.What, func(w string) api.FileChangeWhat { return api.FileChangeWhat(w) }),
		SizeBytes: f.Size, SizeBeforeBytes: f.SizeBefore, InMemory: f.InMemory,
	}
	if !utf8.Valid(f.Path) {
		out.PathBase64 = base64.StdEncoding.EncodeToString(f.Path)
	}
	return out
}

func workloadProcessOf(p core.WorkloadProcess) api.WorkloadProcess {
	return api.WorkloadProcess{PID: p.PID, Command: p.Command, Args: p.Args}
}
