package snapshotstore_test

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/tests3"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob/s3"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// TestHardTimes writes and reads a chain on a real server with random faults: everything that was acknowledged is there
// and unchanged, and nothing else is ever returned for it.
func TestHardTimes(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	proxy, bucket := server.Proxy(t), server.Bucket(t)
	store, err := s3.New(s3.Config{
		Endpoint: "http://" + proxy.Address, Region: tests3.Region, Bucket: bucket, PathStyle: true, Backoff: time.Millisecond, Stall: 2 * time.Second,
		Credentials: s3.Credentials{AccessKey: server.AccessKey, SecretKey: server.SecretKey},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	x := &rig{t: t, blobs: store, project: core.NewID[core.ProjectID]()}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	trouble := func() {
		n, skip := r.Int64N(2000), r.IntN(3)
		faults := []tests3.Fault{
			{Kind: tests3.Answer, Status: 503, Code: "SlowDown"},
			{Kind: tests3.Answer, Status: 500, Code: "InternalError"},
			{Kind: tests3.Drop, Of: tests3.Puts},
			{Kind: tests3.ResetRequest, N: n, Of: tests3.Puts},
			{Kind: tests3.FlipRequest, N: n, Of: tests3.Puts},
			{Kind: tests3.Reset, N: n, Of: tests3.Gets},
			{Kind: tests3.Cut, N: n, Of: tests3.Gets},
			{Kind: tests3.Flip, N: n, Of: tests3.Gets},
			{Kind: tests3.Truncate, N: n, Of: tests3.Gets},
		}
		for range 3 {
			f := faults[r.IntN(len(faults))]
			f.Skip, f.Times = skip, 1
			proxy.Add(f)
		}
	}
	m := newImage(6 << 20)
	m.write(r, 500)
	var ref *snapshotstore.Snapshot
	before := (*image)(nil)
	type generation struct {
		ref manifest.Ref
		m   *image
	}
	var chain []generation
	failed := 0
	for range 12 {
		trouble()
		src := snapshotstore.Source{Name: "memory", Size: m.size, Changed: m.whole(), Read: m.read}
		if before != nil {
			src.Reference = before.read
		}
		w, err := x.write(t.Context(), ref, src)
		if err != nil {
			failed++
			if code := core.CodeOf(err); code != core.CodeStoreUnavailable && !errors.Is(err, t.Context().Err()) {
				t.Errorf("a failed write says %s: %v", code, err)
			}
			continue
		}
		chain = append(chain, generation{w.Manifest, m.clone()})
		ref, before = w.Snapshot, m.clone()
		m.write(r, 60)
	}
	for _, g := range chain {
		trouble()
		got, _, err := x.load(g.ref, "memory")
		if err != nil {
			failed++
			if c := core.CodeOf(err); c != core.CodeStoreUnavailable && c != core.CodeCheckpointCorrupt {
				t.Errorf("a failed read says %s: %v", c, err)
			}
			continue
		}
		got.wantEqual(t, g.m)
	}
	proxy.Clear()
	for _, g := range chain {
		x.check(g.ref, "memory", g.m)
	}
	t.Logf("%d checkpoints, %d writes and reads failed as they must", len(chain), failed)
	if len(chain) < 3 {
		t.Errorf("only %d writes succeeded: the backend tries too little", len(chain))
	}
}
