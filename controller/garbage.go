package controller

import (
	"context"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

const (
	collectEvery    = time.Minute
	collectBatch    = 1000 // objects of one statement, and of one call of the store
	collectTime     = 25 * time.Second
	collectFailures = 3              // in a row, after which the store is taken for being away
	uploadKept      = 24 * time.Hour // an upload that goes on is never that old
	uploadsEvery    = time.Hour
	storePrefix     = "v1/"
	maxStoreDetails = 1000 // of what is wrong
)

// Where a controller may be killed while it collects garbage.
var (
	afterCondemn = failpoint.New("controller.after_condemn") // rows say that objects are to go
	afterDelete  = failpoint.New("controller.after_delete")  // the objects are gone, their rows are not
)

// StoredObject is the row of an object in the store.
type StoredObject struct {
	Key       string
	Bytes     int64
	Condemned bool
}

// Garbage is what a collection has done, or would do.
type Garbage struct {
	DryRun        bool
	Condemned     int   // objects that nothing needs any more, as of now
	Waiting       int   // objects whose grace is not over
	Objects       int   // deleted
	Bytes         int64 // of these
	Debris        int   // attempts that were given up, and have nothing left
	DebrisWaiting int   // those whose grace is not over
	DebrisObjects int   // deleted of such attempts
	DebrisBytes   int64
	More          bool // the time was over before the work was
}

// GarbageTx keeps what of the store is to go. All of it is the system's.
type GarbageTx interface {
	// CondemnObjects looks at up to limit losses of needs and condemns the objects that nothing needs any more. It returns how many
	// losses it has looked at. With dryRun it only looks.
	CondemnObjects(ctx context.Context, limit int, dryRun bool) (looked, condemned int, err error)
	// CondemnedObjects returns up to limit objects that were condemned longer ago than grace, after a key, in the order of their keys, and
	// how many were condemned since.
	CondemnedObjects(ctx context.Context, grace time.Duration, after string, limit int) (list []runnerapi.StoredObject, waiting int, err error)
	// ForgetObjects removes the rows of condemned objects whose bytes are gone.
	ForgetObjects(ctx context.Context, keys []string) error
	// Debris returns prefixes of attempts that ended longer ago than grace without a commit, after one, and how many ended since.
	Debris(ctx context.Context, grace time.Duration, after string, limit int) (prefixes []string, waiting int, err error)
	ForgetDebris(ctx context.Context, prefix string) error
	// Objects returns rows after a key, in the order of their keys, and KnownObjects those of the keys that have one.
	Objects(ctx context.Context, after string, limit int) ([]StoredObject, error)
	KnownObjects(ctx context.Context, keys []string) (map[string]StoredObject, error)
	// SealedAfter returns where sealed checkpoints are, by their ids, from one on; with it if including.
	SealedAfter(ctx context.Context, after core.CheckpointID, including bool, limit int) ([]runnerapi.Stored, error)
	// CountSealed counts those after one.
	CountSealed(ctx context.Context, after core.CheckpointID) (int, error)
	// NeededBy returns the sealed checkpoints that need objects, by their keys.
	NeededBy(ctx context.Context, keys []string) (map[string][]core.CheckpointID, error)
	// OpenPrefixes returns where objects may be without a row: of attempts under way, and debris.
	OpenPrefixes(ctx context.Context) (uploading, debris []string, err error)
}

// collect is the chore.
func (c *Controller) collect(ctx context.Context) error {
	got, err := c.CollectGarbage(ctx, false)
	c.metrics.collected.WithLabelValues("objects").Add(float64(got.Objects + got.DebrisObjects))
	c.metrics.collected.WithLabelValues("bytes").Add(float64(got.Bytes + got.DebrisBytes))
	if got.Objects+got.DebrisObjects > 0 {
		c.log.InfoContext(ctx, "garbage collected", "objects", got.Objects, "bytes", got.Bytes, "debris_objects", got.DebrisObjects, "debris_bytes", got.DebrisBytes)
	}
	return err
}

// CollectGarbage removes from the store what nothing needs, or with dryRun says what it would. Several may run at once, and one may end
// between any two steps: what is to be done is found out anew by the next.
func (c *Controller) CollectGarbage(ctx context.Context, dryRun bool) (Garbage, error) {
	out := Garbage{DryRun: dryRun}
	if err := c.StoreConfigured(); err != nil {
		return out, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, collectTime, errCollectTime)
	defer cancel()
	for _, step := range []func(context.Context, *Garbage) error{c.condemn, c.deleteCondemned, c.deleteDebris} {
		if err := step(ctx, &out); err != nil {
			if errors.Is(context.Cause(ctx), errCollectTime) {
				out.More = true
				return out, nil
			}
			return out, err
		}
	}
	return out, nil
}

var errCollectTime = errors.New("the time of a collection is over")

func (c *Controller) condemn(ctx context.Context, out *Garbage) error {
	for {
		var looked, condemned int
		err := c.store.InTx(ctx, System(), func(tx Tx) (err error) {
			looked, condemned, err = tx.CondemnObjects(ctx, collectBatch, out.DryRun)
			return err
		})
		if err != nil {
			return err
		}
		out.Condemned += condemned
		if looked < collectBatch || out.DryRun {
			return afterCondemn.Hit(ctx)
		}
	}
}

func (c *Controller) deleteCondemned(ctx context.Context, out *Garbage) error {
	for after := ""; ; {
		var list []runnerapi.StoredObject
		err := c.store.InTx(ctx, System(), func(tx Tx) (err error) {
			list, out.Waiting, err = tx.CondemnedObjects(ctx, c.cfg.StoreGrace, after, collectBatch)
			return err
		})
		if err != nil || len(list) == 0 {
			return err
		}
		keys, bytes := make([]string, len(list)), int64(0)
		for i, o := range list {
			keys[i] = o.Key
			bytes += o.Bytes
		}
		if !out.DryRun {
			if err := c.cfg.Store.Delete(ctx, keys...); err != nil {
				return err
			}
			if err := afterDelete.Hit(ctx); err != nil {
				return err
			}
			if err := c.store.InTx(ctx, System(), func(tx Tx) error { return tx.ForgetObjects(ctx, keys) }); err != nil {
				return err
			}
		}
		out.Objects += len(keys)
		out.Bytes += bytes
		after = keys[len(keys)-1]
	}
}

// deleteDebris goes on when some of it cannot be deleted, until that happens several times in a row.
func (c *Controller) deleteDebris(ctx context.Context, out *Garbage) error {
	var failed []error
	inARow := 0
	for after := ""; ; {
		var list []string
		err := c.store.InTx(ctx, System(), func(tx Tx) (err error) {
			list, out.DebrisWaiting, err = tx.Debris(ctx, c.cfg.StoreGrace, after, collectBatch)
			return err
		})
		if err != nil || len(list) == 0 {
			return errors.Join(append(failed, err)...)
		}
		for _, prefix := range list {
			err := c.deleteBelow(ctx, prefix, out)
			if inARow++; err == nil {
				inARow = 0
				continue
			}
			failed = append(failed, err)
			if inARow == collectFailures || ctx.Err() != nil {
				return errors.Join(failed...)
			}
		}
		after = list[len(list)-1]
	}
}

// deleteBelow removes what an attempt has left. It is done with when there was nothing any more.
func (c *Controller) deleteBelow(ctx context.Context, prefix string, out *Garbage) error {
	var keys []string
	found := false
	drop := func() error {
		if len(keys) == 0 || out.DryRun {
			return nil
		}
		// None of them has a row: only commits make them, and this attempt had none.
		known, err := read(ctx, c, System(), func(tx Tx) (map[string]StoredObject, error) { return tx.KnownObjects(ctx, keys) })
		if err != nil {
			return err
		}
		if len(known) > 0 {
			c.log.ErrorContext(ctx, "objects of an attempt that was given up have rows; they are left", "prefix", prefix, "objects", len(known))
			return nil
		}
		err = c.cfg.Store.Delete(ctx, keys...)
		keys = keys[:0]
		return err
	}
	for info, err := range c.cfg.Store.List(ctx, prefix) {
		if err != nil {
			return err
		}
		found = true
		keys = append(keys, info.Key)
		out.DebrisObjects++
		out.DebrisBytes += info.Size
		if len(keys) == collectBatch {
			if err := drop(); err != nil {
				return err
			}
		}
	}
	if found || out.DryRun {
		return drop()
	}
	out.Debris++
	return c.store.InTx(ctx, System(), func(tx Tx) error { return tx.ForgetDebris(ctx, prefix) })
}

// sweepUploads removes what uploads have left that no list shows.
func (c *Controller) sweepUploads(ctx context.Context) error {
	return c.cfg.Store.Sweep(ctx, time.Now().Add(-max(uploadKept, c.cfg.StoreGrace)))
}
