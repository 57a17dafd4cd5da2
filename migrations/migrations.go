// Package migrations has the controller's database schema as numbered golang-migrate files and
// applies them. It owns the schema, and no code that reads or writes rows. A merged migration is
// never edited. Production only goes forward; the down files serve tests.
package migrations

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/golang-migrate/migrate/v4"
	driver "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/coppice-dev/coppice/core"
)

//go:embed *.sql
var files embed.FS

// Version returns the newest schema version that this program knows.
func Version() uint {
	entries, err := fs.ReadDir(files, ".")
	if err != nil {
		panic(err) // the files are part of the program
	}
	var newest uint64
	for _, e := range entries {
		number, _, _ := strings.Cut(path.Base(e.Name()), "_")
		n, err := strconv.ParseUint(number, 10, 32)
		if err != nil {
			panic(fmt.Sprintf("migration %q has no number", e.Name()))
		}
		newest = max(newest, n)
	}
	return uint(newest)
}

// Up brings the database to Version. It is safe to call from several processes at once: one migrates, the others
// wait. A database that is newer than this program, or that a killed migration left half way, is an error.
func Up(ctx context.Context, dsn string) error { return UpOn(ctx, dsn, nil) }

// UpOn is Up on a server that passes a check, where several are in the address. check gets what the address itself wants of a server, which may
// be nil.
func UpOn(ctx context.Context, dsn string, check func(pgconn.ValidateConnectFunc) pgconn.ValidateConnectFunc) error {
	return with(ctx, dsn, check, func(m *migrate.Migrate) error {
		// Under the lock, which another process may hold in the middle of its work: only afterwards is what is seen final.
		err := m.Up()
		if err == nil || errors.Is(err, migrate.ErrNoChange) {
			return nil
		}
		if known := checkKnown(m); known != nil {
			return known
		}
		return err
	})
}

// Down removes the whole schema with its data. It is for tests.
func Down(ctx context.Context, dsn string) error {
	return with(ctx, dsn, nil, func(m *migrate.Migrate) error {
		if err := m.Down(); !errors.Is(err, migrate.ErrNoChange) {
			return err
		}
		return nil
	})
}

// Check reports whether the database has exactly the schema that this program knows.
func Check(ctx context.Context, dsn string) error {
	return with(ctx, dsn, nil, func(m *migrate.Migrate) error {
		if err := checkKnown(m); err != nil {
			return err
		}
		version, _, err := m.Version()
		if errors.Is(err, migrate.ErrNilVersion) {
			version, err = 0, nil
		}
		if err != nil {
			return err
		}
		if version < Version() {
			return core.Errorf(core.FailedPrecondition, core.CodeDatabaseUnavailable,
				"the database has schema version %d and this program needs %d; run the migrations first", version, Version())
		}
		return nil
	})
}

func checkKnown(m *migrate.Migrate) error {
	version, dirty, err := m.Version()
	switch {
	case errors.Is(err, migrate.ErrNilVersion):
		return nil
	case err != nil:
		return err
	case dirty:
		return core.Errorf(core.FailedPrecondition, core.CodeDatabaseUnavailable,
			"schema migration %d was interrupted; restore the database or repair it and set schema_migrations.dirty to false", version)
	case version > Version():
		return core.Errorf(core.FailedPrecondition, core.CodeDatabaseUnavailable,
			"the database has schema version %d, newer than the %d that this program knows; run a newer program", version, Version())
	}
	return nil
}

func with(ctx context.Context, dsn string, check func(pgconn.ValidateConnectFunc) pgconn.ValidateConnectFunc, do func(*migrate.Migrate) error) (err error) {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return fmt.Errorf("parse database address: %w", err)
	}
	if check != nil {
		cfg.ValidateConnect = check(cfg.ValidateConnect)
	}
	db := stdlib.OpenDB(*cfg)
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := db.PingContext(ctx); err != nil {
		return core.Wrapf(err, core.Unavailable, core.CodeDatabaseUnavailable, "the database cannot be reached")
	}
	target, err := driver.WithInstance(db, &driver.Config{})
	if err != nil {
		return fmt.Errorf("prepare migrations: %w", err)
	}
	source, err := iofs.New(files, ".")
	if err != nil {
		return errors.Join(fmt.Errorf("read migrations: %w", err), target.Close())
	}
	m, err := migrate.NewWithInstance("files", source, cfg.Database, patient{target, ctx})
	if err != nil {
		return errors.Join(fmt.Errorf("prepare migrations: %w", err), target.Close())
	}
	defer func() {
		sourceErr, targetErr := m.Close()
		err = errors.Join(err, sourceErr, targetErr)
	}()
	stop := context.AfterFunc(ctx, func() { m.GracefulStop <- true })
	defer stop()
	if err := do(m); err != nil {
		return fmt.Errorf("migrate the database: %w", err)
	}
	return nil
}
