package pgtx_test

import (
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// TestMapError: what ends a session, such as a full disk when one begins, is a database that cannot be used, and no fault of ours.
func TestMapError(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		err  pgconn.PgError
		code core.Code
	}{
		"a full disk when a session begins": {pgconn.PgError{SeverityUnlocalized: "FATAL", Code: "XX000"}, core.CodeDatabaseUnavailable},
		"a full disk":                       {pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "53100"}, core.CodeDatabaseUnavailable},
		"a log that cannot be written":      {pgconn.PgError{SeverityUnlocalized: "PANIC", Code: "XX000"}, core.CodeDatabaseUnavailable},
		"a standby":                         {pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "25006"}, core.CodeDatabaseUnavailable},
		"a server that has failed":          {pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "XX000"}, core.CodeInternal},
		"a statement that is wrong":         {pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "42601"}, core.CodeInternal},
	} {
		if err := pgtx.MapError(t.Context(), &c.err); core.CodeOf(err) != c.code {
			t.Errorf("%s: %v (%s), want %s", what, err, core.CodeOf(err), c.code)
		}
	}
}
