package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/datakeys"
	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/secretstore"
	"github.com/coppice-dev/coppice/core"
)

// AllTx is a transaction with the methods of the controller and of every package below it. A Store gives it; each package gets the part
// that it has declared.
type AllTx interface {
	Tx
	datakeys.Tx
	flows.Tx
	grants.Tx
	secretstore.Tx
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

// The types of these packages that callers of the controller use.
type (
	EncryptionPatch = datakeys.Patch
	ProjectKey      = datakeys.ProjectKey
	Wrapper         = datakeys.Wrapper
)
