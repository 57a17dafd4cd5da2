package testpg

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

const innerEnv = "TESTPG_TEST_INNER" // makes TestInner do something

func TestMain(m *testing.M) { testleak.Main(m, Leak()) }

var migrated atomic.Int32

func migrateThings(ctx context.Context, dsn string) error {
	migrated.Add(1)
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, `CREATE TABLE things (id int PRIMARY KEY)`)
	return err
}

func migrateNothing(context.Context, string) error { return nil }

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func TestEachTestHasItsOwnMigratedDatabase(t *testing.T) {
	t.Parallel()
	for range 4 {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			conn := connect(t, New(t, migrateThings))
			if _, err := conn.Exec(t.Context(), `INSERT INTO things VALUES (1)`); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() {
		if n := migrated.Load(); n != 1 {
			t.Errorf("migrated %d times, want once", n)
		}
	})
}

func TestMigrationsAreToldApart(t *testing.T) {
	t.Parallel()
	for name, migrate := range map[string]func(context.Context, string) error{"none": nil, "other": migrateNothing} {
		conn := connect(t, New(t, migrate))
		var there bool
		if err := conn.QueryRow(t.Context(), `SELECT to_regclass('things') IS NOT NULL`).Scan(&there); err != nil || there {
			t.Errorf("%s: table of another migration: %v, %v", name, there, err)
		}
	}
	s, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.template(func(context.Context, string) error { return nil }); err == nil {
		t.Error("a closure was accepted")
	}
}

func TestDatabaseIsDroppedWithItsTest(t *testing.T) {
	var dsn string // of a subtest that has ended, so the subtests are not parallel
	t.Run("inner", func(t *testing.T) {
		dsn = New(t, nil)
		conn, err := pgx.Connect(t.Context(), dsn) // left open on purpose
		if err != nil {
			t.Fatal(err)
		}
		_ = conn
	})
	if conn, err := pgx.Connect(t.Context(), dsn); err == nil {
		_ = conn.Close(t.Context())
		t.Error("the database is still there")
	}
}

// TestInner runs in its own process: it prints the address of its database and ends in the requested way.
func TestInner(t *testing.T) {
	how := os.Getenv(innerEnv)
	if how == "" {
		return
	}
	fmt.Println(New(t, migrateThings))
	switch how {
	case "panic":
		panic("on purpose")
	case "wait":
		_, _ = io.Copy(io.Discard, os.Stdin)
	}
}

// inner runs TestInner. It returns the URL of its database when that exists, and a function that ends it.
func inner(t *testing.T, how string, env ...string) (dsn, tmp string, end func(kill bool)) {
	t.Helper()
	tmp = t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestInner$")
	cmd.Env = append(append(os.Environ(), innerEnv+"="+how, "TMPDIR="+tmp), env...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(stdout)
	line, err := lines.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "postgres://") {
		t.Fatalf("the inner test said %q, %v", line, err)
	}
	return strings.TrimSpace(line), tmp, func(kill bool) {
		if kill {
			_ = cmd.Process.Kill()
		}
		_ = stdin.Close()
		_, _ = io.Copy(io.Discard, lines) // a process that kept the output open would make `go test` wait
		_ = cmd.Wait()
	}
}

func TestNothingIsLeft(t *testing.T) {
	t.Parallel()
	New(t, nil) // skips where there is no PostgreSQL
	for _, c := range []struct {
		how  string
		kill bool
	}{{"return", false}, {"panic", false}, {"wait", true}} {
		t.Run(c.how, func(t *testing.T) {
			t.Parallel()
			dsn, tmp, end := inner(t, c.how, Variable+"=")
			end(c.kill)
			eventually.True(t, "the server ends", func() bool {
				conn, err := pgx.Connect(t.Context(), dsn)
				if err == nil {
					_ = conn.Close(t.Context())
				}
				return err != nil
			})
			eventually.True(t, "the directory is removed", func() bool {
				left, err := filepath.Glob(filepath.Join(tmp, "coppice-testpg-*"))
				return err == nil && len(left) == 0
			})
		})
	}
}

func TestForeignServer(t *testing.T) {
	t.Parallel()
	New(t, nil)
	s, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	foreign := Variable + "=" + s.dsn(s.admin)
	admin := connect(t, s.dsn(s.admin))
	databases := func(dsn string) (n int) {
		name := dsn[strings.Index(dsn, prefix):][:len(prefix)+len("00000000_")]
		if err := admin.QueryRow(t.Context(), `SELECT count(*) FROM pg_database WHERE starts_with(datname, $1)`, name).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	killed, tmp, end := inner(t, "wait", foreign)
	if left, err := filepath.Glob(filepath.Join(tmp, "*")); err != nil || len(left) != 0 {
		t.Errorf("a foreign server is named and yet there is %v (%v)", left, err)
	}
	living, _, endLiving := inner(t, "wait", foreign)
	defer endLiving(false)
	if n := databases(killed); n != 2 {
		t.Errorf("a living binary has %d databases, want a template and one", n)
	}
	end(true)
	eventually.True(t, "the next binary drops what the killed one left", func() bool {
		_, _, end := inner(t, "return", foreign)
		end(false)
		return databases(killed) == 0 // only after the server noticed that the connection broke
	})
	if n := databases(living); n != 2 {
		t.Errorf("a living binary lost its databases: %d left, want 2", n)
	}
}

func TestBadURL(t *testing.T) {
	t.Parallel()
	if err := new(server).useURL("host=/tmp dbname=x"); err == nil {
		t.Error("a DSN that is not a URL was accepted")
	}
}
