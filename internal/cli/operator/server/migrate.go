package server

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/migrations"
)

// NewMigrateCommand makes the command "coppice migrate".
func NewMigrateCommand(a *cli.App) *cobra.Command {
	var database, databaseFile, level, format string
	var wait time.Duration
	var check bool
	c := &cobra.Command{
		Use:   "migrate",
		Short: "Migrate the controllers' database to the schema of this program",
		Long: `Migrate the controllers' database to the schema of this program, and end. A controller does the same when it starts. Use this command to
migrate, or to learn that it is not possible, before you roll out new controllers. Schemas only go forward. Concurrent migrations wait for
each other.
Every flag can come from the environment: --database from COPPICE_DATABASE, and so on.`,
		Example: "  coppice migrate --database-file /etc/coppice/database\n  coppice migrate --check --database postgres://coppice@db/coppice",
		Args:    cobra.NoArgs,
	}
	f := c.Flags()
	f.StringVar(&database, "database", "", "PostgreSQL `address`, as a URL or key=value pairs")
	f.StringVar(&databaseFile, "database-file", "", "`file` with the address, instead of --database")
	f.DurationVar(&wait, "database-wait", time.Minute, "how long to wait for the database")
	f.BoolVar(&check, "check", false, "change nothing, and fail unless the schema is that of this program")
	logFlags(f, &level, &format)
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := fromEnvironment(a, cmd); err != nil {
			return err
		}
		dsn, err := databaseAddress(database, databaseFile)
		if err != nil {
			return err
		}
		if dsn == "" {
			return core.Errorf(core.Invalid, core.CodeInvalidField, "--database needs the address of a PostgreSQL database, such as postgres://user@host/coppice")
		}
		log, err := newLogger(a.Stderr, level, format)
		if err != nil {
			return exit.Misuse(err)
		}
		if check {
			err = migrations.Check(cmd.Context(), dsn)
		} else {
			err = daemon.Migrate(cmd.Context(), dsn, wait, log)
		}
		if err != nil {
			return err
		}
		return a.Print(map[string]uint{"schema_version": migrations.Version()}, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "The database has schema version %d.\n", migrations.Version())
			return err
		})
	}
	return c
}
