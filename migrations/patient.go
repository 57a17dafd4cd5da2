package migrations

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/golang-migrate/migrate/v4/database"
	"github.com/jackc/pgx/v5/pgconn"
)

// A migration may lose a deadlock against a controller that works. PostgreSQL has undone it whole then, because a file is one
// transaction, and it is run again.
const (
	deadlockRetries = 10
	deadlockPause   = 200 * time.Millisecond
	deadlock        = "40P01"
)

type patient struct {
	database.Driver
	ctx context.Context //nolint:containedctx // the driver's interface has none
}

// Run implements database.Driver.
func (p patient) Run(file io.Reader) error {
	sql, err := io.ReadAll(file)
	if err != nil {
		return fmt.Errorf("read a migration: %w", err)
	}
	for n := 0; ; n++ {
		err := p.Driver.Run(bytes.NewReader(sql))
		if n == deadlockRetries || !deadlocked(err) {
			return err
		}
		select {
		case <-time.After(deadlockPause):
		case <-p.ctx.Done():
			return errors.Join(err, context.Cause(p.ctx))
		}
	}
}

func deadlocked(err error) bool {
	if known, ok := errors.AsType[database.Error](err); ok {
		err = known.OrigErr
	}
	said, ok := errors.AsType[*pgconn.PgError](err)
	return ok && said.Code == deadlock
}
