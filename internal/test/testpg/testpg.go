// Package testpg gives each test a private database in a real PostgreSQL: TEST_DATABASE_URL's server if that is set,
// else one private cluster per test binary, started on first use from the installed programs.
//
// A database is cloned from a migrated template (about 50 ms), so every test sees an empty, current schema and none
// waits for migrations. However a test binary ends, nothing is left behind: the kernel ends the private server with its
// owner, a waiting shell then removes its directory, and on a foreign server the databases of dead binaries are dropped
// by the next one.
package testpg

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/memdir"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// Variable names a server to use instead of a private one. It is a URL whose user may create databases.
const Variable = "TEST_DATABASE_URL"

const (
	prefix         = "coppice_test_"
	startTimeout   = 2 * time.Minute
	maxConnections = 300
	// lockClass is the first half of the advisory lock with which a living test binary marks its databases.
	lockClass = 0x636f7070
)

// New returns the connection URL of a database for this test alone, which is dropped at its end. migrate brings an
// empty database to the wanted schema; it runs once per test binary and must be a named function (migrations.Up), so
// that it can be told from others. With nil the database is empty.
//
// Without PostgreSQL the test is skipped; the requirement's name is "postgres".
func New(tb testing.TB, migrate func(ctx context.Context, dsn string) error) string {
	tb.Helper()
	s, err := shared()
	require.That(tb, "postgres", core.CodeOf(err) != core.CodeIncompatibleHost, core.MessageOf(err)+", or set "+Variable)
	if err != nil {
		tb.Fatalf("start PostgreSQL for tests: %v", err)
	}
	template, err := s.template(migrate)
	if err != nil {
		tb.Fatalf("prepare the template database: %v", err)
	}
	name := fmt.Sprintf("%s%d", s.prefix, s.count.Add(1))
	// The server's own way logs every block. A copy of the files takes two thirds of the processor time.
	if err := s.exec(tb.Context(), "CREATE DATABASE "+name+" TEMPLATE "+template+" STRATEGY file_copy"); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.exec(context.WithoutCancel(tb.Context()), "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			tb.Error(err)
		}
	})
	return s.dsn(name)
}

// Leak tells goleak about the goroutine that holds the private server, which lives as long as the test binary:
//
//	goleak.VerifyTestMain(m, testpg.Leak())
func Leak() goleak.Option {
	return goleak.IgnoreAnyFunction("github.com/coppice-dev/coppice/internal/pgcluster.(*Cluster).hold")
}

// server is the server with this test binary's databases.
type server struct {
	dsn    func(database string) string
	admin  string // the database from which others are made
	prefix string // prefix of the names of our databases
	count  atomic.Int64
	marker *pgx.Conn // holds the advisory lock that says that we live

	mu        sync.Mutex
	templates map[uintptr]func() (string, error) // by the code of the migration
}

var shared = sync.OnceValues(open)

func open() (*server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	s := &server{templates: map[uintptr]func() (string, error){}}
	var err error
	if raw := os.Getenv(Variable); raw != "" {
		err = s.useURL(raw)
	} else {
		err = s.startCluster(ctx)
	}
	if err != nil {
		return nil, err
	}
	return s, s.mark(ctx)
}

func (s *server) useURL(raw string) error {
	u, err := url.Parse(raw)
	if err != nil || !strings.HasPrefix(u.Scheme, "postgres") {
		return fmt.Errorf("%s is not a postgres:// URL", Variable)
	}
	s.admin = strings.TrimPrefix(u.Path, "/")
	s.dsn = func(database string) string {
		v := *u
		v.Path = "/" + database
		return v.String()
	}
	return nil
}

// startCluster starts a server of our own that ends with this process, and a shell that then removes its files.
func (s *server) startCluster(ctx context.Context) error {
	bins, err := pgcluster.Find(ctx, os.Getenv("PGBIN"))
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(memdir.Dir(), "coppice-testpg-")
	if err != nil {
		return err
	}
	if err := removeAfterUs(dir); err != nil {
		return err
	}
	c, err := pgcluster.Start(ctx, pgcluster.Config{
		Dir: filepath.Join(dir, "pg"), Binaries: bins, MaxConnections: maxConnections, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	s.admin, s.dsn = "postgres", c.DSN
	return nil
}

// removeAfterUs starts a shell that waits for the end of a pipe, which only this process holds open, and then removes
// dir. Tests have no hook for their end, least of all when they are killed.
func removeAfterUs(dir string) error {
	const script = `read -r _; n=0; until rm -rf -- "$1" || [ $n -ge 50 ]; do n=$((n+1)); sleep 0.1; done`
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.Command("/bin/sh", "-c", script, "sh", dir) //nolint:gosec,noctx // G204: a fixed script, which must outlive us
	cmd.Stdin = r
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // not reached by the terminal's Ctrl-C
	if err := cmd.Start(); err != nil {
		return err
	}
	lifeline = w
	return cmd.Process.Release()
}

// lifeline is closed by the kernel when this process ends; the variable keeps it from the garbage collector.
var lifeline *os.File //nolint:unused // held, never used

// mark takes the lock that says that our databases are in use, and drops the databases of binaries that have ended.
func (s *server) mark(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, s.dsn(s.admin))
	if err != nil {
		return err
	}
	var raw [4]byte
	_, _ = rand.Read(raw[:]) // never fails
	s.prefix = fmt.Sprintf("%s%x_", prefix, raw)
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1, $2)", lockClass, lockKey(raw)); err != nil {
		return err
	}
	s.marker = conn
	rows, err := conn.Query(ctx, `SELECT datname FROM pg_database WHERE datname LIKE $1`, strings.ReplaceAll(prefix, "_", `\_`)+"%")
	if err != nil {
		return err
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := s.reap(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// reap drops a database if the binary that made it has ended.
func (s *server) reap(ctx context.Context, name string) error {
	var raw []byte
	if n, err := fmt.Sscanf(strings.TrimPrefix(name, prefix), "%08x_", &raw); n != 1 || err != nil || len(raw) != 4 {
		return nil //nolint:nilerr // a database with that prefix that we did not make
	}
	key := lockKey([4]byte(raw))
	var free bool
	if err := s.marker.QueryRow(ctx, "SELECT pg_try_advisory_lock($1, $2)", lockClass, key).Scan(&free); err != nil {
		return err
	}
	if !free {
		return nil
	}
	if _, err := s.marker.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)"); err != nil {
		return err
	}
	_, err := s.marker.Exec(ctx, "SELECT pg_advisory_unlock($1, $2)", lockClass, key)
	return err
}

func lockKey(raw [4]byte) int32 {
	return int32(binary.BigEndian.Uint32(raw[:])) //nolint:gosec // G115: any 32 bits will do
}

// template returns the name of the database that migrate made. The first call makes it.
func (s *server) template(migrate func(ctx context.Context, dsn string) error) (string, error) {
	var code uintptr
	if migrate != nil {
		code = reflect.ValueOf(migrate).Pointer()
		if name := runtime.FuncForPC(code).Name(); strings.Contains(name, ".func") || strings.HasSuffix(name, "-fm") {
			return "", fmt.Errorf("migrate is %s; it must be a named function, because closures cannot be told apart", name)
		}
	}
	s.mu.Lock()
	build, ok := s.templates[code]
	if !ok {
		name := fmt.Sprintf("%stemplate%d", s.prefix, len(s.templates))
		build = sync.OnceValues(func() (string, error) {
			ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
			defer cancel()
			if err := s.exec(ctx, "CREATE DATABASE "+name); err != nil {
				return "", err
			}
			if migrate == nil {
				return name, nil
			}
			return name, migrate(ctx, s.dsn(name))
		})
		s.templates[code] = build
	}
	s.mu.Unlock()
	return build()
}

// exec runs one statement outside the tests' databases. Names in it consist of our own letters and digits.
func (s *server) exec(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, s.dsn(s.admin))
	if err != nil {
		return fmt.Errorf("connect to PostgreSQL for tests: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, sql); err != nil {
		return fmt.Errorf("%s: %w", sql, err)
	}
	return nil
}
