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
	collectFailures = 3              // failures in a row after which the store counts as unreachable
	uploadKept      = 24 * time.Hour // no upload under way is that old
	uploadsEvery    = time.Hour
	storePrefix     = "v1/"
	maxStoreDetails = 1000 // problems of each kind in a report
)

// Where a controller may be killed while it collects garbage.
var (
	afterCondemn = failpoint.New("controller.after_condemn") // rows say that objects will be removed
	afterDelete  = failpoint.New("controller.after_delete")  // the objects are gone, their rows are not
)

// StoredObject is the row of an object in the store.
type StoredObject struct {
	Key       string
	Bytes     int64
	Condemned bool
}

// Garbage is the result of a collection, or of a dry run.
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

// GarbageTx keeps the objects of the store that will be removed. All of them belong to the system.
type GarbageTx interface {
	// CondemnObjects looks at up to limit needs that were lost, and condemns the objects that nothing needs any more. It returns how
	// many lost needs it has looked at. With dryRun it only looks.
	CondemnObjects(ctx context.Context, limit int, dryRun bool) (looked, condemned int, err error)
	// CondemnedObjects returns up to limit objects that were condemned longer ago than grace, after a key, in the order of their keys, and
	// how many were condemned since.
	CondemnedObjects(ctx context.Context, grace time.Duration, after string, limit int) (list []runnerapi.StoredObject, waiting int, err error)
	// ForgetObjects removes the rows of condemned objects whose bytes are gone.
	ForgetObjects(ctx context.Context, keys []string) error
	// Debris returns the prefixes, after a given one, of attempts that ended longer ago than grace without a commit. It also returns how
	// many attempts ended since.
	Debris(ctx context.Context, grace time.Duration, after string, limit int) (prefixes []string, waiting int, err error)
	ForgetDebris(ctx context.Context, prefix string) error
	// Objects returns rows after a key, in the order of their keys, and KnownObjects those of the keys that have one.
	Objects(ctx context.Context, after string, limit int) ([]StoredObject, error)
	KnownObjects(ctx context.Context, keys []string) (map[string]StoredObject, error)
	// SealedAfter returns the places of sealed checkpoints in the store, in the order of their ids, beginning after one, or with it if
	// including is set.
	SealedAfter(ctx context.Context, after core.CheckpointID, including bool, limit int) ([]runnerapi.Stored, error)
	// CountSealed counts the sealed checkpoints after one.
	CountSealed(ctx context.Context, after core.CheckpointID) (int, error)
	// NeededBy returns the sealed checkpoints that need objects, by their keys.
	NeededBy(ctx context.Context, keys []string) (map[string][]core.CheckpointID, error)
	// OpenPrefixes returns the prefixes below which objects may have no row: those of attempts under way, and of debris.
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

// CollectGarbage removes the objects that nothing needs from the store. With dryRun it only says what it would remove. Several collections may
// run at the same time, and one may end between any two steps: the next one finds out again what there is to do.
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

// deleteDebris continues when some of it cannot be deleted, until this happens several times in a row.
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

// deleteBelow removes the objects that an attempt has left. The attempt is done when there are none.
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

// sweepUploads removes the parts of unfinished uploads, which no list of objects shows.
func (c *Controller) sweepUploads(ctx context.Context) error {
	return c.cfg.Store.Sweep(ctx, time.Now().Add(-max(uploadKept, c.cfg.StoreGrace)))
}
