package testpg

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// Pair is a durable primary and a standby that streams from it. Both are real servers of this test alone. It can fail
// over again and again.
type Pair struct {
	tb      testing.TB
	bins    pgcluster.Binaries
	sync    bool
	dirs    [2]string
	servers [2]*pgcluster.Cluster // nil: does not exist
	primary int
	dead    *pgcluster.Cluster // the former primary; nil: there was none, or it is in use again
}

// standbyName is the name of standbys in synchronous_standby_names.
const standbyName = "standby"

// NewPair starts both servers. With synchronous, a commit is acknowledged only when it is on the standby's disk.
func NewPair(tb testing.TB, synchronous bool) *Pair {
	tb.Helper()
	dir, err := os.MkdirTemp("", "coppice-pair-") //nolint:usetesting // the servers' user must reach it, and TempDir is private
	if err != nil {
		tb.Fatal(err)
	}
	if err := os.Chmod(dir, 0o711); err != nil { //nolint:gosec // G302: the servers' user passes through
		tb.Fatal(err)
	}
	p := &Pair{tb: tb, bins: binaries(tb), sync: synchronous, dirs: [2]string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}}
	tb.Cleanup(func() {
		p.End(tb)
		if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	p.start(0)
	p.AddStandby()
	return p
}

// PairOf gives a running, durable server an asynchronous standby. primary is the server's directory, and standby a directory that is made. The
// caller calls End, and must not remove the server.
func PairOf(tb testing.TB, server *pgcluster.Cluster, primary, standby string) *Pair {
	tb.Helper()
	p := &Pair{tb: tb, bins: binaries(tb), dirs: [2]string{primary, standby}, servers: [2]*pgcluster.Cluster{server}}
	p.AddStandby()
	return p
}

func binaries(tb testing.TB) pgcluster.Binaries {
	tb.Helper()
	bins, err := pgcluster.Find(tb.Context(), os.Getenv("PGBIN"))
	require.That(tb, "postgres", core.CodeOf(err) != core.CodeIncompatibleHost, core.MessageOf(err))
	if err != nil {
		tb.Fatal(err)
	}
	return bins
}

// End ends and deletes all servers. Pairs of NewPair end with their test.
func (p *Pair) End(tb testing.TB) {
	tb.Helper()
	p.tb = tb
	for i := range p.servers {
		p.remove(i)
	}
	p.removeDead()
}

func (p *Pair) start(i int) {
	p.tb.Helper()
	var err error
	p.servers[i], err = pgcluster.Start(p.tb.Context(), pgcluster.Config{
		Dir: p.dirs[i], Binaries: p.bins, Durable: true, Log: slog.New(slog.DiscardHandler),
		Settings: map[string]string{"synchronous_commit": "", "wal_keep_size": "64MB", "wal_receiver_status_interval": "1s", "cluster_name": standbyName},
	})
	if err != nil {
		p.tb.Fatal(err)
	}
}

// remove ends a server at once, if it exists, and deletes it.
func (p *Pair) remove(i int) {
	p.tb.Helper()
	if p.servers[i] == nil {
		return
	}
	if err := p.servers[i].Remove(context.WithoutCancel(p.tb.Context())); err != nil {
		p.tb.Error(err)
	}
	p.servers[i] = nil
}

// removeDead deletes the directory of the former primary.
func (p *Pair) removeDead() {
	p.tb.Helper()
	if p.dead != nil {
		if err := p.dead.Remove(context.WithoutCancel(p.tb.Context())); err != nil {
			p.tb.Error(err)
		}
	}
	p.dead = nil
}

// DSN is the address of a database on the server that accepts writes.
func (p *Pair) DSN(database string) string {
	u, err := url.Parse(p.Primary().DSN(database))
	if err != nil {
		p.tb.Fatal(err)
	}
	q := u.Query()
	run := filepath.Base(q.Get("host"))
	port := q.Get("port")
	q.Set("host", filepath.Join(p.dirs[0], run)+","+filepath.Join(p.dirs[1], run))
	q.Set("port", port+","+port)
	q.Set("target_session_attrs", "read-write")
	u.RawQuery = q.Encode()
	return u.String()
}

// Primary is the server that accepts writes.
func (p *Pair) Primary() *pgcluster.Cluster { return p.servers[p.primary] }

// Standby is the other server; nil if there is none.
func (p *Pair) Standby() *pgcluster.Cluster { return p.servers[1-p.primary] }

// AddStandby copies the running primary and starts the copy as a standby that streams from it. An earlier standby is
// deleted.
func (p *Pair) AddStandby() {
	p.tb.Helper()
	i := 1 - p.primary
	p.remove(i)
	p.removeDead()
	u, err := url.Parse(p.Primary().DSN("postgres"))
	if err != nil {
		p.tb.Fatal(err)
	}
	host := u.Query().Get("host")
	owner, err := os.Stat(filepath.Join(p.dirs[p.primary], "data"))
	if err == nil {
		err = os.RemoveAll(p.dirs[i])
	}
	if err == nil {
		err = os.Mkdir(p.dirs[i], 0o711) //nolint:gosec // G301: likewise
	}
	if err != nil {
		p.tb.Fatal(err)
	}
	who := owner.Sys().(*syscall.Stat_t) //nolint:forcetypeassert // on every system that PostgreSQL's processes are run on here
	if err := os.Chown(p.dirs[i], int(who.Uid), int(who.Gid)); err != nil {
		p.tb.Fatal(err)
	}
	cmd := exec.CommandContext(p.tb.Context(), filepath.Join(filepath.Dir(p.bins.Postgres), "pg_basebackup"), //nolint:gosec // G204: PostgreSQL's own program
		"-h", host, "-p", u.Query().Get("port"), "-U", pgcluster.Superuser, "-D", filepath.Join(p.dirs[i], "data"), "-R", "-X", "stream", "-c", "fast", "--no-sync")
	cmd.Dir = "/"
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: who.Uid, Gid: who.Gid}}
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		p.tb.Fatalf("pg_basebackup: %v\n%s", err, out)
	}
	p.start(i)
	if p.sync {
		p.SQL(p.Primary(), "ALTER SYSTEM SET synchronous_standby_names = '"+standbyName+"'", "SELECT pg_reload_conf()")
	}
	eventually.True(p.tb, "the standby streams", func() bool {
		return p.Number(p.Primary(), `SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming' AND (sync_state IN ('sync', 'quorum')) = $1`, p.sync) == 1
	})
}

// SQL runs statements on a server, as the superuser.
func (p *Pair) SQL(on *pgcluster.Cluster, statements ...string) {
	p.tb.Helper()
	conn, err := pgx.Connect(p.tb.Context(), on.DSN("postgres"))
	if err != nil {
		p.tb.Fatal(err)
	}
	for _, s := range statements {
		if _, execErr := conn.Exec(p.tb.Context(), s); execErr != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", s, execErr))
		}
	}
	if err := errors.Join(err, conn.Close(p.tb.Context())); err != nil {
		p.tb.Fatal(err)
	}
}

// Number runs a query on a server that returns one number.
func (p *Pair) Number(on *pgcluster.Cluster, sql string, args ...any) (n int64) {
	p.tb.Helper()
	conn, err := pgx.Connect(p.tb.Context(), on.DSN("postgres"))
	if err == nil {
		err = errors.Join(conn.QueryRow(p.tb.Context(), sql, args...).Scan(&n), conn.Close(p.tb.Context()))
	}
	if err != nil {
		p.tb.Fatalf("%s: %v", sql, err)
	}
	return n
}

// CatchUp waits until the standby has everything that the primary has now.
func (p *Pair) CatchUp() {
	p.tb.Helper()
	now := p.Number(p.Primary(), `SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint`)
	eventually.True(p.tb, "the standby has caught up", func() bool {
		return p.Number(p.Standby(), `SELECT coalesce(pg_last_wal_replay_lsn() - '0/0', 0)::bigint`) >= now
	})
}

// Cut lets the standby catch up and then receive nothing more: later commits are the tail that a failover loses.
func (p *Pair) Cut() {
	p.tb.Helper()
	p.CatchUp()
	p.SQL(p.Standby(), "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
	eventually.True(p.tb, "the standby hears nothing", func() bool {
		return p.Number(p.Standby(), `SELECT count(*) FROM pg_stat_wal_receiver`) == 0
	})
}

// Failover kills the primary and promotes the standby, which is the only server then.
func (p *Pair) Failover() {
	p.tb.Helper()
	old := p.servers[p.primary]
	if err := syscall.Kill(old.PID(), syscall.SIGKILL); err != nil {
		p.tb.Fatal(err)
	}
	<-old.Done()
	p.primary = 1 - p.primary
	p.dead, p.servers[1-p.primary] = old, nil
	if p.sync { // there is no standby to wait for
		p.SQL(p.Primary(), "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
	}
	p.SQL(p.Primary(), "SELECT pg_promote()")
	eventually.True(p.tb, "the standby is promoted", func() bool {
		return p.Number(p.Primary(), `SELECT pg_is_in_recovery()::int`) == 0
	})
}

// Return starts the old primary again, like an operator who does not know that there is another one.
func (p *Pair) Return() {
	p.tb.Helper()
	p.dead = nil
	p.start(1 - p.primary)
}
