// Package storecheck compares the store with the rows, and reads stored data to verify it. It changes
// nothing.
package storecheck

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// Report compares the rows with the store.
type Report struct {
	Objects   int   // with a row and in the store
	Bytes     int64 // of these
	Uploading int   // objects of attempts under way
	Debris    int   // objects that the next collections remove, condemned ones too
	Missing   []model.StoredObject
	Resized   []model.StoredObject // as their rows say
	Foreign   []model.StoredObject // without a row: they belong to nothing, and nothing removes them
	Truncated bool                 // there is more
}

// Sound reports whether the comparison found no problem.
func (r *Report) Sound() bool { return len(r.Missing)+len(r.Resized)+len(r.Foreign) == 0 }

const (
	storePrefix     = "v1/"
	objectsBatch    = 1000 // rows of one statement
	maxStoreDetails = 1000 // problems of each kind in a report
)

// Store runs transactions that see the objects of all projects. Package controller/postgres has the methods of Tx.
type Store interface {
	// InSystem runs fn in a transaction and commits when it returns nil.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx reads the rows of objects, and of the checkpoints that need them.
type Tx interface {
	// Objects returns rows after a key, in the order of their keys, and KnownObjects those of the keys that have one.
	Objects(ctx context.Context, after string, limit int) ([]model.StoredObject, error)
	KnownObjects(ctx context.Context, keys []string) (map[string]model.StoredObject, error)
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

// Keys gives the keys of all objects that sealed checkpoints need.
type Keys func(ctx context.Context, sealed ...runnerapi.Stored) (runnerapi.Keys, error)

// Checker checks the store. It is safe for concurrent use.
type Checker struct {
	blobs blob.Blobs // nil: there is no store
	keys  Keys
	store Store
	data  dataCheck
}

// New makes a checker.
func New(blobs blob.Blobs, keys Keys, store Store) *Checker {
	return &Checker{blobs: blobs, keys: keys, store: store}
}

func inSystem[T any](ctx context.Context, store Store, query func(Tx) (T, error)) (out T, err error) {
	err = store.InSystem(ctx, func(tx Tx) (err error) {
		out, err = query(tx)
		return err
	})
	return out, err
}

// CheckStore lists the store and compares it with the rows. It reads no object. At the end it looks again at objects that were committed
// or deleted meanwhile, which are no problem.
func (c *Checker) CheckStore(ctx context.Context) (Report, error) {
	var out Report
	if c.blobs == nil {
		return out, model.ErrNoStore
	}
	var missing, foreign, resized []string
	note := func(list *[]string, key string) {
		if len(*list) < 2*maxStoreDetails {
			*list = append(*list, key)
		} else {
			out.Truncated = true
		}
	}
	rows := rowReader{c: c}
	row, more, err := rows.next(ctx)
	if err != nil {
		return out, err
	}
	for info, err := range c.blobs.List(ctx, storePrefix) {
		if err != nil {
			return out, err
		}
		for ; more && row.Key < info.Key; row, more, err = rows.next(ctx) {
			note(&missing, row.Key)
		}
		switch {
		case err != nil:
			return out, err
		case !more || row.Key != info.Key:
			note(&foreign, info.Key)
			continue
		case row.Condemned:
			out.Debris++
		case row.Bytes != info.Size:
			note(&resized, row.Key)
		default:
			out.Objects++
			out.Bytes += row.Bytes
		}
		if row, more, err = rows.next(ctx); err != nil {
			return out, err
		}
	}
	for ; more; row, more, err = rows.next(ctx) {
		note(&missing, row.Key)
	}
	if err != nil {
		return out, err
	}
	return out, c.lookAgain(ctx, &out, missing, resized, foreign)
}

// lookAgain separates problems from objects that have changed meanwhile.
func (c *Checker) lookAgain(ctx context.Context, out *Report, missing, resized, foreign []string) error {
	var known map[string]model.StoredObject
	var uploading, debris []string
	err := c.store.InSystem(ctx, func(tx Tx) (err error) {
		if known, err = tx.KnownObjects(ctx, slices.Concat(missing, resized, foreign)); err != nil {
			return err
		}
		uploading, debris, err = tx.OpenPrefixes(ctx)
		return err
	})
	if err != nil {
		return err
	}
	for _, key := range append(missing, resized...) {
		o, ok := known[key]
		if !ok || o.Condemned {
			continue
		}
		info, err := c.blobs.Stat(ctx, key)
		switch {
		case errors.Is(err, blob.ErrNotFound):
			out.add(&out.Missing, o)
		case err != nil:
			return err
		case info.Size != o.Bytes:
			out.add(&out.Resized, o)
		default:
			out.Objects++
			out.Bytes += o.Bytes
		}
	}
	for _, key := range foreign {
		o, ok := known[key]
		switch {
		case ok: // committed meanwhile
			out.Objects++
			out.Bytes += o.Bytes
			continue
		case below(key, uploading):
			out.Uploading++
			continue
		case below(key, debris):
			out.Debris++
			continue
		}
		info, err := c.blobs.Stat(ctx, key)
		if errors.Is(err, blob.ErrNotFound) { // deleted meanwhile
			continue
		}
		if err != nil {
			return err
		}
		out.add(&out.Foreign, model.StoredObject{Key: key, Bytes: info.Size})
	}
	return nil
}

func (r *Report) add(list *[]model.StoredObject, o model.StoredObject) {
	if len(*list) >= maxStoreDetails {
		r.Truncated = true
		return
	}
	*list = append(*list, o)
}

func below(key string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(key, p) })
}

// rowReader reads the rows of all objects, a page at a time.
type rowReader struct {
	c    *Checker
	page []model.StoredObject
	last string
	done bool
}

func (r *rowReader) next(ctx context.Context) (model.StoredObject, bool, error) {
	if len(r.page) == 0 && !r.done {
		var err error
		r.page, err = inSystem(ctx, r.c.store, func(tx Tx) ([]model.StoredObject, error) { return tx.Objects(ctx, r.last, objectsBatch) })
		if err != nil {
			return model.StoredObject{}, false, err
		}
		r.done = len(r.page) < objectsBatch
	}
	if len(r.page) == 0 {
		return model.StoredObject{}, false, nil
	}
	o := r.page[0]
	r.page, r.last = r.page[1:], o.Key
	return o, true, nil
}
