// Package flowrows keeps the flows of workspaces in PostgreSQL: rows of single flows as far as the quotas go, counts of the others, and
// the lists that show both.
package flowrows

import "github.com/coppice-dev/coppice/controller/postgres/pgtx"

// Tx has the statements of this package in a transaction.
type Tx struct {
	*pgtx.Tx
}
