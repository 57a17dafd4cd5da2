package e2e

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// storeAway takes the store from the first host: what is captured meanwhile is used there, is not said to be sealed, and is sealed when the store is
// back.
func storeAway(t *testing.T, f *faultyPool) {
	t.Helper()
	ws := f.forkOn(t, f.first, f.base)
	f.first.Relay.Hold()
	defer f.first.Relay.Resume()
	compare(t, "the parent", after(f.was, "on"), step(t, f.first.stack, ws, "on"))
	g := grown{id: checkpoint(t, f.first.stack, ws).ID, path: []string{"on"}}
	f.goesOn(t, f.first, g)
	cp, err := f.Client.Checkpoint(t.Context(), g.id)
	if err != nil || cp.State != coppice.CheckpointCaptured || !cp.SealedAt.IsZero() {
		t.Errorf("without a store the checkpoint is %s, %v", cp.State, err)
	}
	f.only(t, f.second)
	if _, err := f.Client.ForkCheckpoint(t.Context(), g.id, coppice.ForkCheckpointRequest{}); err == nil {
		t.Error("it was forked where it is not")
	}
	f.first.Relay.Resume()
	f.sealed(t, g.id)
	f.goesOn(t, f.second, g)
	terminate(t, f.first.stack, ws)
}

// changedInStore changes bytes of a checkpoint's objects in the store, where each kind of object has something else: it is refused with the object's
// name, nothing is started and nothing left, until the bytes are as they were.
func changedInStore(t *testing.T, f *faultyPool) {
	t.Helper()
	ws, g := f.parent(t)
	terminate(t, f.first.stack, ws)
	third := f.join("--fetch", "whole", "--cache-size", "0")
	f.goesOn(t, third, f.base) // what it has in common with that is there
	client, kinds := f.store.Client(t), map[string]int{}
	put := func(key string, b []byte) {
		t.Helper()
		if _, err := client.Client.PutObject(t.Context(), f.Bucket, key, bytes.NewReader(b), int64(len(b)), minio.PutObjectOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for info := range client.Client.ListObjects(t.Context(), f.Bucket, minio.ListObjectsOptions{Prefix: "v1/", Recursive: true}) {
		if info.Err != nil {
			t.Fatal(info.Err)
		}
		if !strings.Contains(info.Key, "/"+g.id+"/") {
			continue
		}
		kinds[strings.TrimRight(info.Key[strings.LastIndexByte(info.Key, '/')+1:], "-0123456789")]++
		body, err := client.Client.GetObject(t.Context(), f.Bucket, info.Key, minio.GetObjectOptions{})
		if err != nil {
			t.Fatal(err)
		}
		whole, err := io.ReadAll(body)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range []int{0, 9, 20, len(whole) / 3, len(whole) / 2, len(whole) - 1} {
			changed := bytes.Clone(whole)
			changed[at] ^= 0x10
			put(info.Key, changed)
			_, err := f.Client.ForkCheckpoint(t.Context(), g.id, coppice.ForkCheckpointRequest{})
			if e := wantCode(t, err, "CHECKPOINT_CORRUPT"); !strings.Contains(e.Detail, info.Key) {
				t.Errorf("byte %d of %s: the error does not name it: %v", at, info.Key, e)
			}
			if n := len(third.vmms()); n > 0 || exists(third.Checkpoint(g.id)) {
				t.Errorf("byte %d of %s: %d machines were started, or the checkpoint is there", at, info.Key, n)
			}
		}
		put(info.Key, whole)
	}
	if kinds["manifest"] != 1 || kinds["pack"] == 0 {
		t.Errorf("the checkpoint has %v", kinds)
	}
	began := time.Now()
	f.goesOn(t, third, g)
	t.Logf("%v changed, and whole again: a fork took %.1f s", kinds, time.Since(began).Seconds())
}

// changedLater changes bytes of a checkpoint's memory in the store where a host fetches it while its machine runs: that may be started, and is ended
// when it is to have one of those bytes, or they are found to be others, with the object's name and before anything of them is shown.
func changedLater(t *testing.T, f *faultyPool) {
	t.Helper()
	parent := f.forkOn(t, f.first, f.base)
	g := f.grow(t, parent, "later")
	terminate(t, f.first.stack, parent)
	third := f.join("--cache-size", "0")
	client := f.store.Client(t)
	var largest minio.ObjectInfo
	for info := range client.Client.ListObjects(t.Context(), f.Bucket, minio.ListObjectsOptions{Prefix: "v1/", Recursive: true}) {
		if info.Err != nil {
			t.Fatal(info.Err)
		}
		if strings.Contains(info.Key, "/"+g.id+"/") && info.Size > largest.Size {
			largest = info
		}
	}
	body, err := client.Client.GetObject(t.Context(), f.Bucket, largest.Key, minio.GetObjectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	whole, err := io.ReadAll(body)
	if err != nil {
		t.Fatal(err)
	}
	put := func(b []byte) {
		t.Helper()
		if _, err := client.Client.PutObject(t.Context(), f.Bucket, largest.Key, bytes.NewReader(b), int64(len(b)), minio.PutObjectOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	changed := bytes.Clone(whole)
	changed[len(changed)/2] ^= 0x10 // nearly all of it is what the parent drew at random
	put(changed)
	f.only(t, third)
	res, err := f.Client.ForkCheckpoint(t.Context(), g.id, coppice.ForkCheckpointRequest{})
	if err != nil { // a machine that was to have them before it was ready
		if e := wantCode(t, err, "CHECKPOINT_CORRUPT"); !strings.Contains(e.Detail, largest.Key) {
			t.Errorf("the error does not name %s: %v", largest.Key, e)
		}
	} else {
		ran, err := f.Client.Exec(t.Context(), ids(res)[0], coppice.ExecRequest{Command: []string{"sha256sum", "-c", "/root/lazy"}})
		if err == nil {
			out, _, err := ran.Output()
			if err == nil || len(out) > 0 {
				t.Errorf("the machine has read what was changed: %q, %v", out, err)
			}
		}
		if w := f.awaitLost(t, ids(res)[0], "SANDBOX_LOST"); w.Failure != nil && !strings.Contains(w.Failure.Message, largest.Key) {
			t.Errorf("it is lost because of %q, which does not name %s", w.Failure.Message, largest.Key)
		} else {
			t.Logf("a machine that ran was ended: %+v", w.Failure)
		}
	}
	until(t, "no machine is left", func() (bool, error) { return len(third.vmms()) == 0, nil })
	put(whole)
	f.goesOn(t, f.second, g)
}
