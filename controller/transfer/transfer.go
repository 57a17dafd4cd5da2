// Package transfer moves checkpoints between clusters: it sends a sealed checkpoint as one file, and
// makes a checkpoint of the file that another cluster has sent. A file is foreign: nothing in it is
// believed before it is checked.
package transfer

import (
	"context"
	"io"
	"log/slog"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/datakeys"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/bootclock"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// How many files are read and written at the same time: each takes memory, see snapshotstore.
const (
	maxImports = 4
	maxExports = 8
)

// enter takes a place in a channel of places. It fails if there is none.
func enter(places chan struct{}, what string) (leave func(), err error) {
	select {
	case places <- struct{}{}:
		return func() { <-places }, nil
	default:
		return nil, core.Errorf(core.Exhausted, core.CodeCapacity, "this controller %s %d checkpoints already; repeat the request when one has ended", what, cap(places))
	}
}

// Store runs transactions. Package controller/postgres has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	// InSystem runs fn in a transaction that sees all projects.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx keeps imports under way.
type Tx interface {
	request.Tx

	// Checkpoint does not find pruned checkpoints.
	Checkpoint(ctx context.Context, id core.CheckpointID) (model.Checkpoint, error)
	// BeginImport inserts an import and returns the prefix of the keys of its objects.
	BeginImport(ctx context.Context, project core.ProjectID, id core.CheckpointID, lease time.Duration) (prefix string, err error)
	// RenewImport extends the lease; ErrImportLost.
	RenewImport(ctx context.Context, id core.CheckpointID, lease time.Duration) error
	// CommitImport makes an import a sealed checkpoint; ErrImportLost, QUOTA_EXCEEDED, NAME_TAKEN.
	CommitImport(ctx context.Context, cp model.Checkpoint, in runnerapi.CommitSeal) (model.Checkpoint, error)
	// EndImport gives an import up, and says whether it had been committed. Objects that it has written become debris.
	EndImport(ctx context.Context, project core.ProjectID, id core.CheckpointID) (committed bool, err error)
	// AbandonImports gives up those that are not renewed, of all projects, and frees the idempotency keys of their requests.
	AbandonImports(ctx context.Context) ([]core.CheckpointID, error)
}

// Runners has the one call of a runner that an export needs.
type Runners interface {
	// ExportCheckpoint returns a checkpoint that the runner has as one file, and the size of the file in bytes. The caller closes it.
	ExportCheckpoint(ctx context.Context, endpoint string, id core.CheckpointID, in runnerapi.ExportCheckpoint) (io.ReadCloser, int64, error)
}

// Config says what transfers work with.
type Config struct {
	Blobs blob.Blobs // the store; nil: nothing can be received, and Runners make the files that are sent
	Keys  *datakeys.Keeper
	Clock bootclock.Clock // of leases
	Log   *slog.Logger

	Runners Runners
	// Holder returns a checkpoint that was captured, and the endpoint of a runner that has it; empty if none can be reached.
	Holder func(ctx context.Context, project core.ProjectID, id core.CheckpointID) (model.Checkpoint, string, error)

	Imported func(bytes int64)                              // hears of each checkpoint that was imported
	Remove   func(ctx context.Context, prefix string) error // removes at once what a failed import has stored
}

// Transfers exports and imports. It is safe for concurrent use.
type Transfers struct {
	cfg   Config
	store Store

	imports, exports chan struct{} // one element for each that is under way
}

// New makes transfers. It starts nothing.
func New(cfg Config, store Store) *Transfers {
	return &Transfers{cfg: cfg, store: store, imports: make(chan struct{}, maxImports), exports: make(chan struct{}, maxExports)}
}

func (t *Transfers) configured() error {
	if t.cfg.Blobs == nil {
		return model.ErrNoStore
	}
	return nil
}

func inProject[T any](ctx context.Context, store Store, project core.ProjectID, query func(Tx) (T, error)) (out T, err error) {
	err = store.InProject(ctx, project, func(tx Tx) (err error) {
		out, err = query(tx)
		return err
	})
	return out, err
}

func (t *Transfers) checkpoint(ctx context.Context, project core.ProjectID, id core.CheckpointID) (model.Checkpoint, error) {
	return inProject(ctx, t.store, project, func(tx Tx) (model.Checkpoint, error) { return tx.Checkpoint(ctx, id) })
}
