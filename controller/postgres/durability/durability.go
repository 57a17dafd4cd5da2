// Package durability judges what a database server keeps of the commits that it has acknowledged. It owns the question for
// the server's settings, and what they mean.
package durability

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/coppice-dev/coppice/core"
)

// Report is what a server keeps of a commit that it has acknowledged to us, and which server it is.
type Report struct {
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

// Settings are the names of the settings that Weak may return.
func Settings() []string { return []string{settingFsync, settingFullPages, settingCommit} }

// The answers of Report.Commits.
const (
	InMemory  = "memory"  // acknowledged before it is on a disk
	OnServer  = "server"  // on the disk of the server
	OnStandby = "standby" // on the disk of a standby too
	Received  = "received"
)

// Commits says where a commit is when it is acknowledged: in the memory of the server, on its disk, received by a standby besides, or on the
// disk of a standby too.
func (d Report) Commits() string {
	switch {
	case d.SynchronousCommit == "off" || !d.Fsync:
		return InMemory
	case d.Standbys == "" || d.SynchronousCommit == "local":
		return OnServer
	case d.SynchronousCommit == "remote_write":
		return Received
	}
	return OnStandby
}

// Promise says for people what a commit survives.
func (d Report) Promise() string {
	switch d.Commits() {
	case InMemory:
		return "a crash of the server or its host loses acknowledged commits"
	case OnServer:
		return "acknowledged commits are on the server's disk; a failover to a standby can lose the last ones"
	case Received:
		return "acknowledged commits are on the server's disk and a synchronous standby has received them; they are lost if both fail at once"
	}
	return "acknowledged commits are on the disks of the server and of a synchronous standby; a failover to it loses none"
}

// Weak names the settings that let the server lose acknowledged commits by itself.
func (d Report) Weak() []string {
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
func (d Report) Judge(allowed []string) error {
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

// query asks only what every role may know.
const query = `
	SELECT coalesce(host(inet_server_addr()) || ':' || inet_server_port(), 'socket'), pg_postmaster_start_time(), pg_is_in_recovery(),
		CASE WHEN pg_is_in_recovery() THEN 0 ELSE ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint END,
		current_setting('fsync'), current_setting('full_page_writes'), current_setting('synchronous_commit'), current_setting('synchronous_standby_names')`

// Inspect asks a server. It works on a connection that is not complete yet, too.
func Inspect(ctx context.Context, conn *pgconn.PgConn) (d Report, err error) {
	results, err := conn.Exec(ctx, query).ReadAll()
	if err != nil {
		return d, err
	}
	if len(results) != 1 || len(results[0].Rows) != 1 || len(results[0].Rows[0]) != 8 {
		return d, core.Errorf(core.Internal, core.CodeInternal, "the database did not answer the question for its settings with one row")
	}
	row := results[0].Rows[0]
	d = Report{
		Server: string(row[0]), Started: string(row[1]), Recovers: string(row[2]) == "t", Fsync: string(row[4]) == "on",
		FullPageWrites: string(row[5]) == "on", SynchronousCommit: string(row[6]), Standbys: string(row[7]),
	}
	d.Timeline, err = strconv.ParseInt(string(row[3]), 10, 64)
	return d, err
}
