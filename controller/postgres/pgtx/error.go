package pgtx

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// ErrTimeout is the cause of contexts that end because the database was too slow.
var ErrTimeout = errors.New("the database did not answer in time")

// DeadlockError says that the server has rolled the transaction back so that another may go on: it may run again. It is a type
// because core errors compare equal by code, and another DATABASE_UNAVAILABLE may hide a commit that succeeded.
type DeadlockError struct{}

// Error says what happened.
func (*DeadlockError) Error() string { return "the transaction lost a deadlock" }

// Unwrap gives the core error that callers see.
func (*DeadlockError) Unwrap() error {
	return core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable, "the database is busy; repeat the request")
}

// The constraint that a unique violation names says what is taken.
var uniqueErrors = map[string]error{
	"workspaces_live_name_key":      core.Errorf(core.AlreadyExists, core.CodeNameTaken, "a workspace of that name exists already; choose another or terminate it first"),
	"checkpoints_live_name_key":     core.Errorf(core.AlreadyExists, core.CodeNameTaken, "a checkpoint of that name exists already; choose another or rename it first"),
	"projects_live_name_key":        core.Errorf(core.AlreadyExists, core.CodeNameTaken, "a project of that name exists already; choose another"),
	"checkpoints_template_key":      controller.ErrTemplateExists,
	"sandboxes_live_runner_ip_key":  controller.ErrIdentityTaken,
	"sandboxes_live_tree_ip_key":    controller.ErrIdentityTaken,
	"sandboxes_live_mac_key":        controller.ErrIdentityTaken,
	"sandboxes_live_machine_id_key": controller.ErrIdentityTaken,
	"sandboxes_live_hostname_key":   controller.ErrIdentityTaken,
	"sandboxes_generation_key":      controller.ErrIdentityTaken,
}

// MapError turns what pgx and the server say into the errors that the controller knows. It is the only place that knows
// their codes and the constraint names. An error that is one of ours already passes.
func MapError(ctx context.Context, err error) error {
	var ours *core.Error
	var pg *pgconn.PgError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &ours):
		return err
	case errors.As(err, &pg):
		return mapServerError(pg)
	case context.Cause(ctx) != nil && !errors.Is(context.Cause(ctx), ErrTimeout):
		return context.Cause(ctx)
	}
	// What is left is the connection: refused, reset, closed, too slow.
	return core.Wrapf(err, core.Unavailable, core.CodeDatabaseUnavailable, "the database (PostgreSQL) cannot be reached; nothing was changed that is not reported, repeat the request later")
}

// IsLockTimeout reports whether another transaction held a row for too long.
func IsLockTimeout(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pg.Code == "55P03" // lock_not_available
}

func mapServerError(pg *pgconn.PgError) error {
	switch pg.Code {
	case "23505": // unique_violation
		if known, ok := uniqueErrors[pg.ConstraintName]; ok {
			return known
		}
	case "23514": // check_violation
		switch pg.ConstraintName {
		case "workspaces_transition_check", "checkpoints_transition_check", "operations_transition_check", "checkpoints_immutable_check":
			return core.Wrapf(pg, core.Conflict, core.CodeStateConflict, "the object's state has changed meanwhile; read it again")
		case "checkpoints_annotations_check":
			return core.Wrapf(pg, core.Invalid, core.CodeInvalidField, "annotations are too large")
		}
	case "40001", "40P01": // serialization_failure, deadlock_detected
		return &DeadlockError{}
	case "55P03", "57014": // lock_not_available, query_canceled (by a timeout of ours)
		return core.Wrapf(pg, core.Unavailable, core.CodeDatabaseUnavailable, "the database (PostgreSQL) is too busy; repeat the request later")
	}
	switch pg.Code[:2] {
	case "08", "53", "57", "58": // connection, resources, operator intervention, system error
		return core.Wrapf(pg, core.Unavailable, core.CodeDatabaseUnavailable, "the database (PostgreSQL) is unavailable; repeat the request later")
	}
	if pg.SeverityUnlocalized == "FATAL" || pg.SeverityUnlocalized == "PANIC" { // the server has ended the session, or has refused to begin one
		return core.Wrapf(pg, core.Unavailable, core.CodeDatabaseUnavailable, "the database (PostgreSQL) cannot be used now; repeat the request later")
	}
	if pg.Code == "25006" { // read_only_sql_transaction: a standby, or a full disk
		return core.Wrapf(pg, core.Unavailable, core.CodeDatabaseUnavailable, "the database (PostgreSQL) takes no writes; repeat the request later")
	}
	return core.Wrapf(pg, core.Internal, core.CodeInternal, "the database refused a change; the log has the cause under this request id")
}
