package postgres

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/core"
)

// Durability is what a server keeps of a commit that it has acknowledged to us, and which server it is.
type Durability struct {
	Server   string    `db:"server"`   // address and port, or "socket"
	Started  time.Time `db:"started"`  // when the server process began
	Timeline int64     `db:"timeline"` // raised by each promotion; 0 while it recovers
	Recovers bool      `db:"recovers"` // a standby: it takes no writes

	Fsync             bool   `db:"fsync"`
	FullPageWrites    bool   `db:"full_page_writes"`
	SynchronousCommit string `db:"synchronous_commit"` // of our sessions: the role or the database may have one of its own
	Standbys          string `db:"standbys"`           // synchronous_standby_names
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
	SELECT coalesce(host(inet_server_addr()) || ':' || inet_server_port(), 'socket') AS server,
		pg_postmaster_start_time() AS started, pg_is_in_recovery() AS recovers,
		CASE WHEN pg_is_in_recovery() THEN 0 ELSE ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint END AS timeline,
		current_setting('fsync')::bool AS fsync, current_setting('full_page_writes')::bool AS full_page_writes,
		current_setting('synchronous_commit') AS synchronous_commit, current_setting('synchronous_standby_names') AS standbys`

func inspect(ctx context.Context, conn *pgx.Conn) (Durability, error) {
	rows, err := conn.Query(ctx, inspectQuery)
	if err != nil {
		return Durability{}, mapError(ctx, err)
	}
	d, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Durability])
	return d, mapError(ctx, err)
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
	d, err := inspect(ctx, conn.Conn())
	if err == nil && s.check != nil {
		err = s.check(d)
	}
	return d, err
}

// Recheck has every connection checked again before it is used: settings may have changed under those that are open.
func (s *Store) Recheck() { s.pool.Reset() }

// checkNew is what every new connection must pass.
func (s *Store) checkNew(ctx context.Context, conn *pgx.Conn) error {
	d, err := inspect(ctx, conn)
	if err != nil {
		return fmt.Errorf("ask a database server for its settings: %w", err)
	}
	return s.check(d)
}
