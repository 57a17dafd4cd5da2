// Package fleetrows keeps runners in PostgreSQL: their identities, leases, heartbeats, loads and images, and what they
// report of writes and of usage.
package fleetrows

import "github.com/coppice-dev/coppice/controller/postgres/pgtx"

// Tx has the statements of this package in a transaction.
type Tx struct {
	*pgtx.Tx
}
