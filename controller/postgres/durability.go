package postgres

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/coppice-dev/coppice/core"
)

// Durability is what a server keeps of a commit that it has acknowledged to us, and which server it is.
type Durability struct {
	Server   string // address and port, or "socket"
	Started  string // when the server process began
	Timeline int64  // raised by each promotion; 0 while it recovers
	Recovers bool   // a standby: it takes no writes

	Fsync             bool
	FullPageWrites    bool
	SynchronousCommit string // of our sessions: the role or the database may have one of its own
	Standbys          string // synchronous_standby_names
}

// The settings without which a server loses what it has acknowledged. They are the values of --allow-weak-database.
const (
	settingFsync     = "fsync"
	settingFullPages = "full_page_writes"
	settingCommit    = "synchronous_commit"
)

// DurabilitySettings are the names of the settings that Weak may return.
func DurabilitySettings() []string { return []string{settingFsync, settingFullPages, settingCommit} }

// The answers of Durability.Commits.
const (
	CommitsInMemory  = "memory"  // acknowledged before it is on a disk
	CommitsOnServer  = "server"  // on the disk of the server
	CommitsOnStandby = "standby" // on the disk of a standby too
	CommitsReceived  = "received"
)

// Commits says where a commit is when it is acknowledged: in the memory of the server, on its disk, received by a standby besides, or on the
// disk of a standby too.
func (d Durability) Commits() string {
	switch {
	case d.SynchronousCommit == "off" || !d.Fsync:
		return CommitsInMemory
	case d.Standbys == "" || d.SynchronousCommit == "local":
		return CommitsOnServer
	case d.SynchronousCommit == "remote_write":
		return CommitsReceived
	}
	return CommitsOnStandby
}

// Promise says for people what a commit survives.
func (d Durability) Promise() string {
	switch d.Commits() {
	case CommitsInMemory:
		return "a crash of the server or its host loses acknowledged commits"
	case CommitsOnServer:
		return "acknowledged commits are on the server's disk; a failover to a standby can lose the last ones"
	case CommitsReceived:
		return "acknowledged commits are on the server's disk and a synchronous standby has received them; they are lost if both fail at once"
	}
	return "acknowledged commits are on the disks of the server and of a synchronous standby; a failover to it loses none"
}

// Weak names the settings that let the server lose acknowledged commits by itself.
func (d Durability) Weak() []string {
	var weak []string
	for name, good := range map[string]bool{settingFsync: d.Fsync, settingFullPages: d.FullPageWrites, settingCommit: d.SynchronousCommit != "off"} {
		if !good {
			weak = append(weak, name)
		}
	}
	slices.Sort(weak)
	return weak
}

// Judge refuses a server that takes no writes, or that loses acknowledged commits by itself. allowed names settings that may be weak.
func (d Durability) Judge(allowed []string) error {
	if d.Recovers {
		return core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable,
			"the database server at %s is a standby and takes no writes; name all servers in the address of the database, with target_session_attrs=read-write", d.Server)
	}
	bad := slices.DeleteFunc(d.Weak(), func(name string) bool { return slices.Contains(allowed, name) })
	if len(bad) == 0 {
		return nil
	}
	return core.Errorf(core.FailedPrecondition, core.CodeDatabaseUnavailable,
		"the database server at %s can lose acknowledged commits when it or its host crashes: %s off; turn it on, or start with --allow-weak-database=%s if the data may be lost",
		d.Server, strings.Join(bad, ", "), strings.Join(bad, ","))
}

// inspectQuery asks only what every role may know.
const inspectQuery = `
	SELECT coalesce(host(inet_server_addr()) || ':' || inet_server_port(), 'socket'), pg_postmaster_start_time(), pg_is_in_recovery(),
		CASE WHEN pg_is_in_recovery() THEN 0 ELSE ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint END,
		current_setting('fsync'), current_setting('full_page_writes'), current_setting('synchronous_commit'), current_setting('synchronous_standby_names')`

// inspect works on a connection that is not complete yet, too.
func inspect(ctx context.Context, conn *pgconn.PgConn) (d Durability, err error) {
	results, err := conn.Exec(ctx, inspectQuery).ReadAll()
	if err != nil {
		return d, mapError(ctx, err)
	}
	if len(results) != 1 || len(results[0].Rows) != 1 || len(results[0].Rows[0]) != 8 {
		return d, core.Errorf(core.Internal, core.CodeInternal, "the database did not answer the question for its settings with one row")
	}
	row := results[0].Rows[0]
	d = Durability{
		Server: string(row[0]), Started: string(row[1]), Recovers: string(row[2]) == "t", Fsync: string(row[4]) == "on",
		FullPageWrites: string(row[5]) == "on", SynchronousCommit: string(row[6]), Standbys: string(row[7]),
	}
	d.Timeline, err = strconv.ParseInt(string(row[3]), 10, 64)
	return d, err
}

// Inspect asks the server of one of the pool's connections. An answer that Config.Check refuses is an error.
func (s *Store) Inspect(ctx context.Context) (Durability, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, callTimeout, errTimeout)
	defer cancel()
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return Durability{}, mapError(ctx, err)
	}
	defer conn.Release()
	d, err := inspect(ctx, conn.Conn().PgConn())
	if err == nil && s.check != nil {
		err = s.check(d)
	}
	return d, err
}

// Recheck has every connection checked again before it is used: settings may have changed under those that are open.
func (s *Store) Recheck() { s.pool.Reset() }

// CheckNew returns what every new connection must pass besides next: Config.Check. Of several servers in the address, the first that passes is
// taken.
func (s *Store) CheckNew(next pgconn.ValidateConnectFunc) pgconn.ValidateConnectFunc {
	return func(ctx context.Context, conn *pgconn.PgConn) error {
		if next != nil {
			if err := next(ctx, conn); err != nil {
				return err
			}
		}
		d, err := inspect(ctx, conn)
		if err != nil {
			return fmt.Errorf("ask a database server for its settings: %w", err)
		}
		return s.check(d)
	}
}
