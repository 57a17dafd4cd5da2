// Package storegc removes from the store what nothing needs any more: objects that were condemned
// longer ago than a grace period, what attempts to upload have left behind, and parts of unfinished
// uploads. The rows say what is needed; the bucket is listed only below prefixes of attempts that
// were given up.
package storegc

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// How often the periodic jobs run.
const (
	Every        = time.Minute // between two collections
	UploadsEvery = time.Hour   // between two sweeps of uploads
)

const (
	collectBatch    = 1000 // objects of one statement, and of one call of the store
	collectTime     = 25 * time.Second
	collectFailures = 3              // failures in a row after which the store counts as unreachable
	uploadKept      = 24 * time.Hour // no upload under way is that old
)

// Where a controller may be killed while it collects garbage.
var (
	afterCondemn = failpoint.New("controller.after_condemn") // rows say that objects will be removed
	afterDelete  = failpoint.New("controller.after_delete")  // the objects are gone, their rows are not
)

// Garbage is the result of a collection, or of a dry run.
type Garbage struct {
	DryRun        bool
	Condemned     int   // objects that nothing needs any more, as of now
	Waiting       int   // objects whose grace is not over
	Objects       int   // deleted
	Bytes         int64 // of these
	Debris        int   // attempts that were given up and have no objects left
	DebrisWaiting int   // those whose grace is not over
	DebrisObjects int   // deleted objects of such attempts
	DebrisBytes   int64
	More          bool // the time ended before the work
}

// Store runs transactions that see the objects of all projects. Package controller/postgres has the methods of Tx.
type Store interface {
	// InSystem runs fn in a transaction and commits when it returns nil.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx keeps the objects of the store that will be removed.
type Tx interface {
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
	// KnownObjects returns the rows of those of the keys that have one.
	KnownObjects(ctx context.Context, keys []string) (map[string]model.StoredObject, error)
}

// Config says what a collector works with.
type Config struct {
	Blobs   blob.Blobs
	Grace   time.Duration                  // how long an object that is no longer needed stays
	Removed func(objects int, bytes int64) // hears what was deleted
	Log     *slog.Logger
}

// Collector removes garbage. It is safe for concurrent use.
type Collector struct {
	cfg   Config
	store Store
}

// New makes a collector. It starts nothing.
func New(cfg Config, store Store) *Collector { return &Collector{cfg: cfg, store: store} }

// Collect is the periodic job.
func (c *Collector) Collect(ctx context.Context) error {
	got, err := c.collect(ctx, false)
	c.cfg.Removed(got.Objects+got.DebrisObjects, got.Bytes+got.DebrisBytes)
	if got.Objects+got.DebrisObjects > 0 {
		c.cfg.Log.InfoContext(ctx, "garbage collected", "objects", got.Objects, "bytes", got.Bytes, "debris_objects", got.DebrisObjects, "debris_bytes", got.DebrisBytes)
	}
	return err
}

// CollectGarbage removes the objects that nothing needs from the store. With dryRun it only says what it would remove. Several collections may
// run at the same time, and one may end between any two steps: the next one finds out again what there is to do.
func (c *Collector) CollectGarbage(ctx context.Context, dryRun bool) (Garbage, error) {
	if c.cfg.Blobs == nil {
		return Garbage{DryRun: dryRun}, model.ErrNoStore
	}
	return c.collect(ctx, dryRun)
}

func (c *Collector) collect(ctx context.Context, dryRun bool) (Garbage, error) {
	out := Garbage{DryRun: dryRun}
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

func (c *Collector) condemn(ctx context.Context, out *Garbage) error {
	for {
		var looked, condemned int
		err := c.store.InSystem(ctx, func(tx Tx) (err error) {
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

func (c *Collector) deleteCondemned(ctx context.Context, out *Garbage) error {
	for after := ""; ; {
		var list []runnerapi.StoredObject
		err := c.store.InSystem(ctx, func(tx Tx) (err error) {
			list, out.Waiting, err = tx.CondemnedObjects(ctx, c.cfg.Grace, after, collectBatch)
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
			if err := c.cfg.Blobs.Delete(ctx, keys...); err != nil {
				return err
			}
			if err := afterDelete.Hit(ctx); err != nil {
				return err
			}
			if err := c.store.InSystem(ctx, func(tx Tx) error { return tx.ForgetObjects(ctx, keys) }); err != nil {
				return err
			}
		}
		out.Objects += len(keys)
		out.Bytes += bytes
		after = keys[len(keys)-1]
	}
}

// deleteDebris continues when some of it cannot be deleted, until this happens several times in a row.
func (c *Collector) deleteDebris(ctx context.Context, out *Garbage) error {
	var failed []error
	inARow := 0
	for after := ""; ; {
		var list []string
		err := c.store.InSystem(ctx, func(tx Tx) (err error) {
			list, out.DebrisWaiting, err = tx.Debris(ctx, c.cfg.Grace, after, collectBatch)
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

// RemoveBelow removes at once what an attempt has left below its prefix, if the attempt can no longer be committed. The prefix stays listed as
// debris, so a later collection removes what is left.
func (c *Collector) RemoveBelow(ctx context.Context, prefix string) error {
	var gone Garbage
	err := c.deleteBelow(ctx, prefix, &gone)
	c.cfg.Removed(gone.DebrisObjects, gone.DebrisBytes)
	return err
}

// deleteBelow removes the objects that an attempt has left. The attempt is done when there are none.
func (c *Collector) deleteBelow(ctx context.Context, prefix string, out *Garbage) error {
	var keys []string
	found := false
	drop := func() error {
		if len(keys) == 0 || out.DryRun {
			return nil
		}
		// None of them has a row: only commits make them, and this attempt had none.
		var known map[string]model.StoredObject
		err := c.store.InSystem(ctx, func(tx Tx) (err error) {
			known, err = tx.KnownObjects(ctx, keys)
			return err
		})
		if err != nil {
			return err
		}
		if len(known) > 0 {
			c.cfg.Log.ErrorContext(ctx, "objects of an attempt that was given up have rows; they are left", "prefix", prefix, "objects", len(known))
			return nil
		}
		err = c.cfg.Blobs.Delete(ctx, keys...)
		keys = keys[:0]
		return err
	}
	for info, err := range c.cfg.Blobs.List(ctx, prefix) {
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
	return c.store.InSystem(ctx, func(tx Tx) error { return tx.ForgetDebris(ctx, prefix) })
}

// SweepUploads removes the parts of unfinished uploads, which no list of objects shows.
func (c *Collector) SweepUploads(ctx context.Context) error {
	return c.cfg.Blobs.Sweep(ctx, time.Now().Add(-max(uploadKept, c.cfg.Grace)))
}
