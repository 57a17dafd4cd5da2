package controller_test

import (
	"context"
	"fmt"
	"iter"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/events"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// TestListsOfARunner sends what a runner may say of a checkpoint and of its fetches, up to the bound and beyond it.
func TestListsOfARunner(t *testing.T) {
	t.Parallel()
	const (
		ancestors = 4096
		fetches   = 10000
		objects   = 1 << 20
	)
	files, store := withStore(t)
	w := newWorld(t, store)
	ws := w.create("a")
	first := w.checkpoint(ws.ID)
	w.seal(files, ws.Parent, first.ID)
	second := w.checkpoint(ws.ID)
	others := make([]core.CheckpointID, fetches)
	for i := range others {
		others[i] = core.NewID[core.CheckpointID]()
	}
	for before, found := range map[int]bool{ancestors - 1: true, ancestors: false} {
		begun, err := w.BeginSeal(t.Context(), w.runner.ID(), runnerapi.BeginSeal{
			LeaseEpoch: w.epoch, CheckpointID: second.ID, Ancestors: append(others[:before:before], first.ID),
		})
		if err != nil || (begun.Reference != nil) != found {
			t.Errorf("with %d ancestors before the one that is sealed: %+v, %v", before, begun.Reference, err)
		}
	}
	for before, held := range map[int]int{fetches - 1: 1, fetches: 0} {
		w.fetching = append(others[:before:before], first.ID)
		w.beat()
		if n := w.number(`SELECT count(*) FROM store_holds`); n != held {
			t.Errorf("with %d fetches before the one of a checkpoint that there is: %d are held", before, n)
		}
	}
	w.fetching = nil
	for name, spoil := range map[string]func(*runnerapi.CommitSeal){
		"needs":   func(c *runnerapi.CommitSeal) { c.Needs = make([]string, objects+1) },
		"written": func(c *runnerapi.CommitSeal) { c.Written = make([]runnerapi.StoredObject, objects+1) },
	} {
		u := w.begin(files, second.ID)
		if err := u.Write(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		spoil(&u.Commit)
		err := u.End(t.Context())
		wantCode(t, err, core.CodeInvalidField)
		if !strings.Contains(core.MessageOf(err), fmt.Sprint(objects)) {
			t.Errorf("%s: the error does not name the bound: %v", name, err)
		}
	}
	w.seal(files, second.ID)
}

// TestStreamsOfAProject opens as many event streams as a project may have: the next one is refused, and those of another project are not.
func TestStreamsOfAProject(t *testing.T) {
	t.Parallel()
	const most = 128
	w := newWorld(t)
	open := func(project core.ProjectID) (*events.Stream, error) {
		return w.Events.Stream(t.Context(), project, "", events.Filter{}, -1)
	}
	var last *events.Stream
	for range most {
		last = stream(t, w.Controller, w.project, "", events.Filter{}, -1)
	}
	_, err := open(w.project)
	wantCode(t, err, core.CodeCapacity)
	other, err := w.Tenancy.CreateProject(t.Context(), w.admin(), "other", controller.QuotasPatch{}, controller.EncryptionPatch{})
	if err != nil {
		t.Fatal(err)
	}
	stream(t, w.Controller, other.ID, "", events.Filter{}, -1)
	last.Close()
	s, err := open(w.project)
	if err != nil {
		t.Fatalf("after one has ended: %v", err)
	}
	s.Close()
}

// fullStore is a store with many more objects.
type fullStore struct {
	blob.Blobs
	more []string
}

func (c fullStore) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		for info, err := range c.Blobs.List(ctx, prefix) {
			if !yield(info, err) {
				return
			}
		}
		for _, key := range c.more {
			if !yield(blob.Info{Key: key, Size: 1}, nil) {
				return
			}
		}
	}
}

func (c fullStore) Stat(ctx context.Context, key string) (blob.Info, error) {
	if strings.HasPrefix(key, "v1/zz/") {
		return blob.Info{Key: key, Size: 1}, nil
	}
	return c.Blobs.Stat(ctx, key)
}

// TestProblemsOfTheStoreAreBounded: a check of a store in which very much is wrong names 1,000 objects of each kind, and says that there
// are more.
func TestProblemsOfTheStoreAreBounded(t *testing.T) {
	t.Parallel()
	const most, there = 1000, 3000
	files, _ := withStore(t)
	c := fullStore{Blobs: files}
	for i := range there {
		c.more = append(c.more, fmt.Sprintf("v1/zz/%05d", i))
	}
	w := newWorld(t, func(cfg *controller.Config, r *runnertest.Config) { cfg.Store, r.Store = c, files })
	w.sql(`INSERT INTO store_objects (key, project_id, checkpoint_id, attempt, bytes) SELECT 'v1/aa/' || i, $1, 'ckpt_x', 1, 1 FROM generate_series(1, $2::int) i`, w.project, there)
	got, err := w.CheckStore(t.Context())
	if err != nil || len(got.Foreign) != most || len(got.Missing) != most || !got.Truncated {
		t.Errorf("%d of %d foreign objects, %d of %d missing ones, %v, %v", len(got.Foreign), there, len(got.Missing), there, got.Truncated, err)
	}
}
