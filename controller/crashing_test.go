package controller_test

import (
	"context"
	"errors"
	"io"
	"iter"
	"sync"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

var errCrashed = errors.New("the process was killed")

// fate is what becomes of one piece of work, whose steps are the transactions and the calls of the store that its context reaches: after a
// number of steps the process that does it is killed, so that it does nothing more, or it stands still until it is let go on.
type fate struct {
	mu      sync.Mutex // guards what follows
	left    int        // steps until it happens; negative: it never does
	crashed bool
	stop    chan struct{} // it stands still until this is closed; nil: it is killed instead
	paused  func()        // called when it begins to
}

type fateKey struct{}

func with(ctx context.Context, f *fate) context.Context { return context.WithValue(ctx, fateKey{}, f) }

// step comes before and after everything that lasts.
func step(ctx context.Context) error {
	f, _ := ctx.Value(fateKey{}).(*fate)
	if f == nil {
		return nil
	}
	f.mu.Lock()
	now := f.left == 0
	f.left--
	if now && f.stop == nil {
		f.crashed = true
	}
	dead := f.crashed
	f.mu.Unlock()
	if now && !dead {
		f.paused()
		<-f.stop
	}
	if dead {
		return errCrashed
	}
	return nil
}

func (f *fate) killed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.crashed
}

// crashingStore is a database whose transactions are steps: they have happened when a process is killed after them, and nobody has heard so.
type crashingStore struct{ withoutPeriodicJobs }

// InTx implements controller.Store.
func (s crashingStore) InTx(ctx context.Context, scope controller.Scope, fn func(controller.AllTx) error) error {
	if err := step(ctx); err != nil {
		return err
	}
	err := s.withoutPeriodicJobs.InTx(ctx, scope, fn)
	return errors.Join(err, step(ctx))
}

// crashingBlobs is a store of which the same is true.
type crashingBlobs struct{ blob.Blobs }

// Put implements blob.Blobs.
func (s crashingBlobs) Put(ctx context.Context, key string, body io.ReaderAt, size int64, digest core.Digest) error {
	if err := step(ctx); err != nil {
		return err
	}
	return errors.Join(s.Blobs.Put(ctx, key, body, size, digest), step(ctx))
}

// Get implements blob.Blobs.
func (s crashingBlobs) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if err := step(ctx); err != nil {
		return nil, err
	}
	return s.Blobs.Get(ctx, key, off, n)
}

// List implements blob.Blobs.
func (s crashingBlobs) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	if err := step(ctx); err != nil {
		return func(yield func(blob.Info, error) bool) { yield(blob.Info{}, err) }
	}
	return s.Blobs.List(ctx, prefix)
}

// Delete implements blob.Blobs. Half of it is a step, too.
func (s crashingBlobs) Delete(ctx context.Context, keys ...string) error {
	half := len(keys) / 2
	for _, some := range [][]string{keys[:half], keys[half:]} {
		if err := step(ctx); err != nil {
			return err
		}
		if err := s.Blobs.Delete(ctx, some...); err != nil {
			return err
		}
	}
	return step(ctx)
}
