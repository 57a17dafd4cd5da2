//go:build !linux

package pgcluster

import (
	"context"

	"github.com/coppice-dev/coppice/core"
)

// Cluster is a running server.
type Cluster struct{}

// Start fails: a private server is run on Linux only.
func Start(context.Context, Config) (*Cluster, error) {
	return nil, core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost, "a private PostgreSQL is run on Linux only")
}

// DSN returns nothing: there is no server.
func (*Cluster) DSN(database string) string { return dsn("", database) }

// PID returns 0: there is no server.
func (*Cluster) PID() int { return 0 }

// Done returns nil: there is no server.
func (*Cluster) Done() <-chan struct{} { return nil }

// Err returns nil: there is no server.
func (*Cluster) Err() error { return nil }

// Stop does nothing: there is no server.
func (*Cluster) Stop(context.Context) error { return nil }

// Remove does nothing: there is no server.
func (*Cluster) Remove(context.Context) error { return nil }
