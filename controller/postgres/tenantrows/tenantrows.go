// Package tenantrows keeps projects in PostgreSQL, with what belongs to a project as a whole: its keys, quotas, idempotency keys,
// encryption keys, secrets and audit log.
package tenantrows

import "github.com/coppice-dev/coppice/controller/postgres/pgtx"

// Tx has the statements of this package in a transaction.
type Tx struct {
	*pgtx.Tx
}
