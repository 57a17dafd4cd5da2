// Package grantrows keeps grants and their holders in PostgreSQL.
package grantrows

import "github.com/coppice-dev/coppice/controller/postgres/pgtx"

// Tx has the statements of this package in a transaction.
type Tx struct {
	*pgtx.Tx
}
