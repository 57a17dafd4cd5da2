package e2b_test

import (
	"context"
	"maps"
	"net/http"
	"testing"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/controller/compat/e2b/envd/filesystem"
	"github.com/coppice-dev/coppice/internal/test/eventually"
)

func (w *world) upload(s sandbox, path, text string, header map[string]string) {
	w.t.Helper()
	h := map[string]string{"Content-Type": "application/octet-stream"}
	maps.Copy(h, header)
	w.envd(s, ask{method: "POST", path: "/files?path=" + path, body: text, header: h}).want(w.t, http.StatusOK, nil)
}

// A watcher that is polled returns each event once, over a pause too; it ends when it is removed.
func TestWatcher(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base","timeout":600}`)
	f, ctx := w.files(s, connect.WithProtoJSON()), t.Context()
	if _, err := f.MakeDir(ctx, connect.NewRequest(&filesystem.MakeDirRequest{Path: "/seen"})); err != nil {
		t.Fatal(err)
	}
	made, err := f.CreateWatcher(ctx, connect.NewRequest(&filesystem.CreateWatcherRequest{Path: "/seen", IncludeEntry: true}))
	if err != nil {
		t.Fatal(err)
	}
	id := made.Msg.GetWatcherId()
	events := func() (out []string) {
		t.Helper()
		got, err := f.GetWatcherEvents(ctx, connect.NewRequest(&filesystem.GetWatcherEventsRequest{WatcherId: id}))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range got.Msg.GetEvents() {
			out = append(out, e.GetType().String()+" "+e.GetName()+" "+e.GetEntry().GetPath())
		}
		return out
	}
	if got := events(); len(got) != 0 {
		t.Errorf("before any change: %v", got)
	}
	w.upload(s, "/seen/a", "1", nil)
	if diff := cmp.Diff([]string{"EVENT_TYPE_CREATE a /seen/a", "EVENT_TYPE_WRITE a /seen/a"}, events()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := events(); len(got) != 0 {
		t.Errorf("events came twice: %v", got)
	}
	w.do(ask{method: "POST", path: "/sandboxes/" + s.SandboxID + "/pause"}).want(t, http.StatusNoContent, nil)
	w.do(ask{method: "POST", path: "/v2/sandboxes/" + s.SandboxID + "/connect", body: `{"timeout":600}`}).want(t, http.StatusCreated, nil)
	if _, err := f.Remove(ctx, connect.NewRequest(&filesystem.RemoveRequest{Path: "/seen/a"})); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"EVENT_TYPE_REMOVE a "}, events()); diff != "" {
		t.Errorf("after a pause (-want +got):\n%s", diff)
	}
	remove := connect.NewRequest(&filesystem.RemoveWatcherRequest{WatcherId: id})
	if _, err := f.RemoveWatcher(ctx, remove); err != nil {
		t.Error(err)
	}
	if _, err := f.RemoveWatcher(ctx, connect.NewRequest(remove.Msg)); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("a removed watcher: %v", err)
	}
}

// A stream sends events as they come; when its client hangs up, the workspace has one watch less.
func TestWatchDir(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base","timeout":600}`)
	w.upload(s, "/seen/before", "1", nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := w.files(s).WatchDir(ctx, connect.NewRequest(&filesystem.WatchDirRequest{Path: "/seen", Recursive: true}))
	if err != nil || !stream.Receive() || stream.Msg().GetStart() == nil {
		t.Fatalf("%v: %v", err, stream.Err())
	}
	w.upload(s, "/seen/deep/er", "1", nil)
	for _, want := range []string{"deep/er", "deep/er"} {
		if !stream.Receive() {
			t.Fatal(stream.Err())
		}
		if e := stream.Msg().GetFilesystem(); e.GetName() != want || e.GetEntry() != nil {
			t.Errorf("%v, want %s", e, want)
		}
	}
	cancel()
	_ = stream.Close()
	eventually.True(t, "the watch is gone", func() bool {
		list, err := w.rest.Watches(t.Context(), "ws_"+s.SandboxID)
		if err != nil {
			t.Fatal(err)
		}
		return len(list) == 0
	})
}

// An upload gives a file its metadata, and the next one replaces it.
func TestMetadataOfFiles(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base","timeout":600}`)
	for _, c := range []struct {
		header map[string]string
		want   map[string]string
	}{
		{map[string]string{"X-Metadata-A": "1", "X-Metadata-B": "2"}, map[string]string{"a": "1", "b": "2"}},
		{map[string]string{"X-Metadata-A": "3"}, map[string]string{"a": "3"}},
		{nil, nil},
	} {
		w.upload(s, "/m", "x", c.header)
		got, err := w.files(s).Stat(t.Context(), connect.NewRequest(&filesystem.StatRequest{Path: "/m"}))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c.want, got.Msg.GetEntry().GetMetadata()); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}
