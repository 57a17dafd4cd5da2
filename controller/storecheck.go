package controller

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// StoreReport compares the rows with the store.
type StoreReport struct {
	Objects   int   // with a row, that are there
	Bytes     int64 // of these
	Uploading int   // objects of attempts under way
	Debris    int   // objects that the next collections remove, condemned ones too
	Missing   []StoredObject
	Resized   []StoredObject // as their rows say
	Foreign   []StoredObject // without a row: they belong to nothing, and nothing removes them
	Truncated bool           // there is more
}

// Sound reports whether the comparison found no problem.
func (r *StoreReport) Sound() bool { return len(r.Missing)+len(r.Resized)+len(r.Foreign) == 0 }

// CheckStore lists the store and compares it with the rows. It reads no object. At the end it looks again at objects that were committed
// or deleted meanwhile, which are no problem.
func (c *Controller) CheckStore(ctx context.Context) (StoreReport, error) {
	var out StoreReport
	if err := c.StoreConfigured(); err != nil {
		return out, err
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
	for info, err := range c.cfg.Store.List(ctx, storePrefix) {
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
func (c *Controller) lookAgain(ctx context.Context, out *StoreReport, missing, resized, foreign []string) error {
	var known map[string]StoredObject
	var uploading, debris []string
	err := c.store.InTx(ctx, System(), func(tx Tx) (err error) {
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
		info, err := c.cfg.Store.Stat(ctx, key)
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
		info, err := c.cfg.Store.Stat(ctx, key)
		if errors.Is(err, blob.ErrNotFound) { // deleted meanwhile
			continue
		}
		if err != nil {
			return err
		}
		out.add(&out.Foreign, StoredObject{Key: key, Bytes: info.Size})
	}
	return nil
}

func (r *StoreReport) add(list *[]StoredObject, o StoredObject) {
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
	c    *Controller
	page []StoredObject
	last string
	done bool
}

func (r *rowReader) next(ctx context.Context) (StoredObject, bool, error) {
	if len(r.page) == 0 && !r.done {
		var err error
		r.page, err = read(ctx, r.c, System(), func(tx Tx) ([]StoredObject, error) { return tx.Objects(ctx, r.last, collectBatch) })
		if err != nil {
			return StoredObject{}, false, err
		}
		r.done = len(r.page) < collectBatch
	}
	if len(r.page) == 0 {
		return StoredObject{}, false, nil
	}
	o := r.page[0]
	r.page, r.last = r.page[1:], o.Key
	return o, true, nil
}
