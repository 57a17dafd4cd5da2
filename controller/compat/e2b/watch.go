package e2b

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/coppice-dev/coppice/controller/compat/e2b/envd/filesystem"
	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// maxCursors bounds the memory of watchers.
const maxCursors = 20_000

// watchers remembers what clients have read of the watchers that they poll. A watcher of E2B is a watch of the workspace. If its
// place was forgotten, or another controller served it, its client reads the events that the workspace keeps from their start.
type watchers struct {
	mu       sync.Mutex           // guards the maps; the older one goes when the newer one is full
	now, old map[watcherKey]int64 // numbers of the last events that were read
}

type watcherKey struct {
	ws    coppice.WorkspaceID
	watch coppice.WatchID
}

func (w *watchers) cursor(k watcherKey) int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n, ok := w.now[k]; ok {
		return n
	}
	return w.old[k]
}

func (w *watchers) moveTo(k watcherKey, seq int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, known := w.now[k]; w.now == nil || !known && len(w.now) >= maxCursors/2 {
		w.old, w.now = w.now, map[watcherKey]int64{}
	}
	w.now[k] = max(w.now[k], w.old[k], seq)
}

func (w *watchers) forget(k watcherKey) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.now, k)
	delete(w.old, k)
}

// watch begins to watch a directory.
func (v visit) watch(ctx context.Context, dir string, recursive bool) (place, coppice.Watch, error) {
	p, err := v.at(ctx, dir)
	if err != nil {
		return p, coppice.Watch{}, err
	}
	if err := p.directory(ctx); err != nil {
		return p, coppice.Watch{}, err
	}
	w, err := p.CreateWatch(ctx, p.ws, coppice.CreateWatchRequest{Path: p.path, Recursive: recursive, User: p.user.asUser()})
	return p, w, rpcError(ctx, fileError(err, p.path))
}

var eventTypes = map[coppice.WatchEventType]filesystem.EventType{
	coppice.WatchCreate: filesystem.EventType_EVENT_TYPE_CREATE,
	coppice.WatchWrite:  filesystem.EventType_EVENT_TYPE_WRITE,
	coppice.WatchRemove: filesystem.EventType_EVENT_TYPE_REMOVE,
	coppice.WatchRename: filesystem.EventType_EVENT_TYPE_RENAME,
	coppice.WatchChmod:  filesystem.EventType_EVENT_TYPE_CHMOD,
}

// errLost says that events are missing. E2B has no event for this, and to leave it out would look as if nothing had happened.
var errLost = connect.NewError(connect.CodeDataLoss, errors.New("there were more changes than the workspace keeps: some events are lost; list the directory, and watch it again"))

// event translates an event. With an entry, it describes the path as it is now, if it still exists.
func (p *place) event(ctx context.Context, e coppice.WatchEvent, entry bool) (*filesystem.FilesystemEvent, error) {
	kind, known := eventTypes[e.Type]
	if !known {
		return nil, errLost
	}
	out := &filesystem.FilesystemEvent{Name: e.Name, Type: kind}
	if entry && e.Type != coppice.WatchRemove && e.Type != coppice.WatchRename {
		if found, err := p.entry(ctx, e.Path); err == nil {
			out.Entry = found
		}
	}
	return out, nil
}

// forgetTime bounds the removal of a watch whose client has gone.
const forgetTime = 10 * time.Second

// unwatch ends a watch, even if the client has gone. A watch that stays gives way when another one needs its place.
func (p *place) unwatch(ctx context.Context, id coppice.WatchID) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), forgetTime)
	defer cancel()
	_ = p.DeleteWatch(ctx, p.ws, id) // see above
}

// WatchDir sends the changes of a directory until the client hangs up.
func (files) WatchDir(ctx context.Context, req *connect.Request[filesystem.WatchDirRequest], stream *connect.ServerStream[filesystem.WatchDirResponse]) error {
	p, w, err := visitOf(ctx).watch(ctx, req.Msg.GetPath(), req.Msg.GetRecursive())
	if err != nil {
		return err
	}
	defer p.unwatch(ctx, w.ID)
	out := &beating[*filesystem.WatchDirResponse]{send: stream.Send, pulse: func() *filesystem.WatchDirResponse {
		return &filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Keepalive{Keepalive: &filesystem.WatchDirResponse_KeepAlive{}}}
	}}
	if err := out.put(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Start{Start: &filesystem.WatchDirResponse_StartEvent{}}}); err != nil {
		return err
	}
	defer out.beat(ctx, keepalive(req.Header()))()
	for e, err := range p.WatchEvents(ctx, p.ws, w.ID, 0) {
		if err != nil {
			return rpcError(ctx, p.streamEnded(ctx, err))
		}
		p.links = maxLinks // the bound is for one event
		event, err := p.event(ctx, e, req.Msg.GetIncludeEntry())
		if err != nil {
			return err
		}
		if err := out.put(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Filesystem{Filesystem: event}}); err != nil {
			return err
		}
	}
	return nil // the directory is gone
}

// CreateWatcher begins to watch a directory for a client that polls.
func (f files) CreateWatcher(ctx context.Context, req *connect.Request[filesystem.CreateWatcherRequest]) (*connect.Response[filesystem.CreateWatcherResponse], error) {
	_, w, err := visitOf(ctx).watch(ctx, req.Msg.GetPath(), req.Msg.GetRecursive())
	if err != nil {
		return nil, err
	}
	id := w.ID
	if req.Msg.GetIncludeEntry() {
		id += withEntries
	}
	return connect.NewResponse(&filesystem.CreateWatcherResponse{WatcherId: id}), nil
}

// withEntries at the end of a watcher's id says that its events have entries.
const withEntries = ".entries"

// GetWatcherEvents returns the events since the last call.
func (f files) GetWatcherEvents(ctx context.Context, req *connect.Request[filesystem.GetWatcherEventsRequest]) (*connect.Response[filesystem.GetWatcherEventsResponse], error) {
	v := visitOf(ctx)
	w, entries, err := v.watcher(ctx, req.Msg.GetWatcherId())
	if err != nil {
		return nil, err
	}
	k := watcherKey{v.ws, w.ID}
	at := f.cursor(k)
	out := &filesystem.GetWatcherEventsResponse{}
	if w.Last <= at {
		return connect.NewResponse(out), nil
	}
	p := place{visit: v, links: maxLinks}
	for e, err := range v.WatchEvents(ctx, v.ws, w.ID, at) {
		if err != nil {
			return nil, rpcError(ctx, err)
		}
		event, err := p.event(ctx, e, entries)
		if err != nil {
			f.moveTo(k, e.Seq) // it is told once
			return nil, err
		}
		out.Events = append(out.Events, event)
		if at = e.Seq; at >= w.Last {
			break // later ones come with the next call
		}
	}
	f.moveTo(k, at)
	return connect.NewResponse(out), nil
}

// watcher finds the watch of a watcher.
func (v visit) watcher(ctx context.Context, id string) (w coppice.Watch, entries bool, err error) {
	id, entries = strings.CutSuffix(id, withEntries)
	list, err := v.Watches(ctx, v.ws)
	if err != nil {
		return w, false, rpcError(ctx, err)
	}
	for _, w := range list {
		if w.ID == id {
			return w, entries, nil
		}
	}
	return w, false, connect.NewError(connect.CodeNotFound, fmt.Errorf("watcher with id %s not found", shared.Clip(id)))
}

// RemoveWatcher ends a watch.
func (f files) RemoveWatcher(ctx context.Context, req *connect.Request[filesystem.RemoveWatcherRequest]) (*connect.Response[filesystem.RemoveWatcherResponse], error) {
	v := visitOf(ctx)
	w, _, err := v.watcher(ctx, req.Msg.GetWatcherId())
	if err != nil {
		return nil, err
	}
	f.forget(watcherKey{v.ws, w.ID})
	return connect.NewResponse(&filesystem.RemoveWatcherResponse{}), rpcError(ctx, v.DeleteWatch(ctx, v.ws, w.ID))
}
