package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/secretstore"
)

// secretStore runs the transactions of secrets.
type secretStore struct{ store Store }

// InSystem implements secretstore.Store.
func (s secretStore) InSystem(ctx context.Context, fn func(secretstore.Tx) error) error {
	return s.store.InTx(ctx, System(), func(tx Tx) error { return fn(tx) })
}
