package coppice_test

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// DiffCheckpoints answers in three pages; the second one is empty.
func (s *strict) DiffCheckpoints(_ context.Context, r api.DiffCheckpointsRequestObject) (api.DiffCheckpointsResponseObject, error) {
	s.note(r.Params)
	page := api.DiffCheckpoints200JSONResponse{FromID: r.CheckpointID, ToID: r.Params.To, Items: []api.FileChange{}, FilesComplete: true}
	file := func(path string) {
		page.Items = append(page.Items, api.FileChange{Path: path, Change: api.FileAdded, Type: api.ChangedFile})
	}
	switch r.Params.Cursor {
	case "":
		file("/a")
		page.NextCursor, page.MemoryChangedBytes = "2", new(int64)
		page.Processes = &api.ProcessChanges{Started: []api.WorkloadProcess{}, Gone: []api.WorkloadProcess{}}
	case "2":
		page.NextCursor = "3"
	default:
		file("/b")
	}
	return page, nil
}

func TestDiffCheckpoints(t *testing.T) {
	t.Parallel()
	s, c := newStrict(t)
	from, to := "ckpt_01jtest0000000000000000000", "ckpt_01jtest0000000000000000001"
	var paths []string
	pages, withMemory := 0, 0
	for p, err := range c.DiffCheckpoints(t.Context(), from, to) {
		if err != nil {
			t.Fatal(err)
		}
		if pages++; p.MemoryChangedBytes != nil && p.Processes != nil {
			withMemory++
		}
		for _, f := range p.Items {
			paths = append(paths, f.Path)
		}
	}
	if diff := cmp.Diff([]string{"/a", "/b"}, paths); diff != "" || pages != 3 || withMemory != 1 || len(s.seen) != 3 {
		t.Errorf("%d pages, %d with memory, %d requests: %s", pages, withMemory, len(s.seen), diff)
	}
	for _, err := range c.DiffCheckpoints(t.Context(), from, to) { // a reader may stop early
		if err != nil {
			t.Error(err)
		}
		break
	}
	if len(s.seen) != 4 {
		t.Errorf("%d requests, want 4", len(s.seen))
	}
	other, err := coppice.New(coppice.Config{Server: "http://127.0.0.1:1", Token: token})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	failures := 0
	for _, err := range other.DiffCheckpoints(t.Context(), from, to) {
		if err != nil {
			failures++
		}
	}
	if failures != 1 {
		t.Errorf("a server that is away gave %d errors, want 1", failures)
	}
}
