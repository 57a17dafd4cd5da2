package testpg

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// Server starts a durable server for this test alone. settings override those of package pgcluster.
func Server(tb testing.TB, settings map[string]string) *pgcluster.Cluster {
	tb.Helper()
	bins, err := pgcluster.Find(tb.Context(), os.Getenv("PGBIN"))
	require.That(tb, "postgres", core.CodeOf(err) != core.CodeIncompatibleHost, core.MessageOf(err))
	if err != nil {
		tb.Fatal(err)
	}
	c, err := pgcluster.Start(tb.Context(), pgcluster.Config{
		Dir: filepath.Join(tb.TempDir(), "pg"), Binaries: bins, Durable: true, Log: slog.New(slog.DiscardHandler), Settings: settings,
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := c.Remove(context.WithoutCancel(tb.Context())); err != nil {
			tb.Error(err)
		}
	})
	return c
}

// Changeable are settings with which ALTER SYSTEM, ALTER ROLE and ALTER DATABASE can change the durability of a Server.
func Changeable() map[string]string {
	return map[string]string{"fsync": "", "full_page_writes": "", "synchronous_commit": ""}
}

// Exec runs statements as the superuser of a server, each in its own transaction.
func Exec(tb testing.TB, c *pgcluster.Cluster, statements ...string) {
	tb.Helper()
	conn, err := pgx.Connect(tb.Context(), c.DSN("postgres"))
	if err != nil {
		tb.Fatal(err)
	}
	for _, s := range statements {
		_, execErr := conn.Exec(tb.Context(), s)
		err = errors.Join(err, execErr)
	}
	if err := errors.Join(err, conn.Close(tb.Context())); err != nil {
		tb.Fatal(err)
	}
}
