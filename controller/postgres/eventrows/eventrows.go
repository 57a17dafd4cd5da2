// Package eventrows keeps events in PostgreSQL, in the order of their ids.
package eventrows

import "github.com/coppice-dev/coppice/controller/postgres/pgtx"

// Tx has the statements of this package in a transaction.
type Tx struct {
	*pgtx.Tx
}
