package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/datakeys"
	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/sealing"
	"github.com/coppice-dev/coppice/controller/secretstore"
	"github.com/coppice-dev/coppice/controller/storecheck"
	"github.com/coppice-dev/coppice/controller/storegc"
	"github.com/coppice-dev/coppice/controller/transfer"
	"github.com/coppice-dev/coppice/core"
)

// AllTx is a transaction with the methods of the controller and of every package below it. A Store gives it; each package gets the part
// that it has declared.
type AllTx interface {
	Tx
	datakeys.Tx
	flows.Tx
	grants.Tx
	sealing.Tx
	secretstore.Tx
	storecheck.Tx
	storegc.Tx
	transfer.Tx
}

// ownStore runs the transactions of the controller itself.
type ownStore struct{ Store }

// InTx is Store.InTx with the controller's own methods.
func (s ownStore) InTx(ctx context.Context, scope Scope, fn func(Tx) error) error {
	return s.Store.InTx(ctx, scope, func(tx AllTx) error { return fn(tx) })
}

// partStore runs the transactions of one package, which sees only the methods that it has declared.
type partStore[T any] struct {
	store Store
	part  func(AllTx) T
}

// InProject runs fn in a transaction of a project and commits when it returns nil.
func (s partStore[T]) InProject(ctx context.Context, project core.ProjectID, fn func(T) error) error {
	return s.store.InTx(ctx, InProject(project), func(tx AllTx) error { return fn(s.part(tx)) })
}

// InSystem runs fn in a transaction that sees all projects and commits when it returns nil.
func (s partStore[T]) InSystem(ctx context.Context, fn func(T) error) error {
	return s.store.InTx(ctx, System(), func(tx AllTx) error { return fn(s.part(tx)) })
}

// makeParts makes the packages whose use cases are those of the controller.
func (c *Controller) makeParts() {
	store := c.store.Store
	c.Sealer = sealing.New(sealing.Config{
		Blobs: c.cfg.Store, Keys: c.dataKeys, Log: c.log,
		Sealed: func(bytes int64, timings []core.Timing) {
			c.metrics.sealed(bytes, timings)
			c.feed.hint()
		},
		Ended: func(outcome string) { c.metrics.seals.WithLabelValues(outcome).Inc() },
	}, partStore[sealing.Tx]{store, func(tx AllTx) sealing.Tx { return tx }})
	c.Collector = storegc.New(storegc.Config{
		Blobs: c.cfg.Store, Grace: c.cfg.StoreGrace, Removed: c.metrics.removed, Log: c.log,
	}, partStore[storegc.Tx]{store, func(tx AllTx) storegc.Tx { return tx }})
	c.Transfers = transfer.New(transfer.Config{
		Blobs: c.cfg.Store, Keys: c.dataKeys, Clock: c.cfg.Clock, Log: c.log, Remove: c.Collector.RemoveBelow,
		Imported: func(bytes int64) {
			c.metrics.stored.Add(float64(bytes))
			c.feed.hint()
		},
	}, partStore[transfer.Tx]{store, func(tx AllTx) transfer.Tx { return tx }})
	c.Checker = storecheck.New(c.cfg.Store, c.dataKeys.For, partStore[storecheck.Tx]{store, func(tx AllTx) storecheck.Tx { return tx }})
}

// The types of these packages that callers of the controller use.
type (
	EncryptionPatch = datakeys.Patch
	ProjectKey      = datakeys.ProjectKey
	Wrapper         = datakeys.Wrapper
	Garbage         = storegc.Garbage
	StoreReport     = storecheck.Report
	StoreData       = storecheck.Data
	StoreProblem    = storecheck.Problem
	StoredObject    = model.StoredObject
	SealAttempt     = sealing.Attempt
	ExportedFile    = transfer.ExportedFile
)

// MaxStoreParts is the largest number of parts into which the stored data can be divided for a check.
const MaxStoreParts = storecheck.MaxParts

// ErrImportLost says that an import was given up because it was not renewed in time.
var ErrImportLost = transfer.ErrImportLost
