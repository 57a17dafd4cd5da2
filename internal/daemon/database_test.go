package daemon_test

import (
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/controller/postgres/durability"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testaddr"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestWeakDatabase starts controllers over servers that can lose acknowledged commits. They say so, and start only where they may.
func TestWeakDatabase(t *testing.T) {
	t.Parallel()
	c := testpg.Server(t, testpg.Changeable())
	dir := t.TempDir()
	for _, test := range []struct {
		name    string
		set     string
		allow   []string
		commits string // empty: it does not start
	}{
		{"as installed", "", nil, durability.OnServer},
		{"fsync off", "ALTER SYSTEM SET fsync = off", nil, ""},
		{"fsync off, another setting allowed", "ALTER SYSTEM SET fsync = off", []string{"synchronous_commit"}, ""},
		{"fsync off and allowed", "ALTER SYSTEM SET fsync = off", []string{"fsync"}, durability.InMemory},
		{"half pages", "ALTER SYSTEM SET full_page_writes = off", nil, ""},
		{"an asynchronous role", "ALTER ROLE postgres SET synchronous_commit = off", nil, ""},
		{"an asynchronous role, allowed", "ALTER ROLE postgres SET synchronous_commit = off", []string{"synchronous_commit"}, durability.InMemory},
	} {
		if test.set != "" {
			testpg.Exec(t, c, test.set, "SELECT pg_reload_conf()")
		}
		// Backends begin with what the postmaster has read.
		eventually.True(t, test.name+" is in force", func() bool { return inForce(t, c, test.set) })
		cfg := daemon.ControllerConfig{
			Database: c.DSN("postgres"), DatabaseWait: time.Minute, Listen: testaddr.New(), RunnerListen: testaddr.New(), KeyFile: filepath.Join(dir, "key"),
			Metrics: "127.0.0.1:0", AllowWeak: test.allow,
		}
		if test.commits == "" {
			p := begin(t, "controller", serverConfig{Controller: cfg}, nil)
			if status := p.wait(t); status == 0 || !strings.Contains(p.text(t), "--allow-weak-database=") || !strings.Contains(p.text(t), "level=ERROR") {
				t.Errorf("%s: status %d:\n%s", test.name, status, p.text(t))
			}
		} else {
			var ready daemon.ControllerReady
			p := begin(t, "controller", serverConfig{Controller: cfg}, &ready)
			got := scrape(t, ready.Metrics)
			for _, want := range []string{`coppice_database_commits{where="` + test.commits + `"} 1`, "coppice_database_refused 0", "coppice_database_timeline 1"} {
				if !strings.Contains(got, want) {
					t.Errorf("%s: the metrics lack %s", test.name, want)
				}
			}
			if ready.Database.Commits != test.commits || ready.Database.Promise == "" || len(ready.Database.Weak) != len(test.allow) {
				t.Errorf("%s: the controller says %+v", test.name, ready.Database)
			}
			for _, name := range test.allow {
				if !strings.Contains(got, `coppice_database_weak{setting="`+name+`"} 1`) {
					t.Errorf("%s: the metrics do not show %s", test.name, name)
				}
			}
			if text := p.text(t); !strings.Contains(text, "database server found") || !strings.Contains(text, "promise=") || strings.Contains(text, "level=WARN") != (len(test.allow) > 0) {
				t.Errorf("%s: the log is\n%s", test.name, text)
			}
			p.stop(t)
		}
		testpg.Exec(t, c, "ALTER SYSTEM RESET ALL", "ALTER ROLE postgres RESET ALL", "SELECT pg_reload_conf()")
	}
}

// inForce reports whether new sessions have what a statement has set; an empty one: whether all is as installed.
func inForce(t *testing.T, c *pgcluster.Cluster, set string) bool {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), c.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	want := map[string]string{"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
	for name := range want {
		if strings.Contains(set, name) {
			want[name] = "off"
		}
	}
	for name, value := range want {
		var got string
		if err := conn.QueryRow(t.Context(), "SELECT current_setting($1)", name).Scan(&got); err != nil {
			t.Fatal(err)
		}
		if got != value {
			return false
		}
	}
	return true
}

// TestDatabaseWeakens turns fsync off under a controller, whose connections stay open: it works no more, says why, and goes on by itself
// when fsync is on again.
func TestDatabaseWeakens(t *testing.T) {
	t.Parallel()
	server := testpg.Server(t, map[string]string{"fsync": ""})
	c := newClusterOf(t, func(cfg *daemon.ControllerConfig) { cfg.Database, cfg.AllowWeak = server.DSN("postgres"), nil })
	answer := func() *coppice.Error {
		_, err := c.client.Checkpoint(t.Context(), "cp_00000000000000000000000000")
		e, ok := errors.AsType[*coppice.Error](err)
		if !ok {
			t.Fatalf("a checkpoint that is not there: %v", err)
		}
		return e
	}
	answered := answer().Code
	testpg.Exec(t, server, "ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")
	eventually.True(t, "requests are refused", func() bool {
		err := answer()
		return err.Code == coppice.CodeDatabaseUnavailable && strings.Contains(err.Detail, "refused")
	})
	if got := scrape(t, c.ready.Metrics); !strings.Contains(got, "coppice_database_refused 1") {
		t.Error("the metrics do not show that the database is refused")
	}
	log, err := os.ReadFile(c.log)
	if err != nil || !strings.Contains(string(log), "settings of the database server changed") {
		t.Errorf("the log does not say it: %v", err)
	}
	testpg.Exec(t, server, "ALTER SYSTEM RESET fsync", "SELECT pg_reload_conf()")
	eventually.True(t, "requests are answered", func() bool { return answer().Code == answered })
}

// TestMigratesWhereItWorks: of two servers the first is refused, and the schema is made on the one that the controller uses.
func TestMigratesWhereItWorks(t *testing.T) {
	t.Parallel()
	refused, used := testpg.Server(t, map[string]string{"fsync": "off"}), testpg.Server(t, nil)
	host := func(c *pgcluster.Cluster) (*url.URL, url.Values) {
		u, err := url.Parse(c.DSN("postgres"))
		if err != nil {
			t.Fatal(err)
		}
		return u, u.Query()
	}
	u, q := host(refused)
	_, other := host(used)
	q.Set("host", q.Get("host")+","+other.Get("host"))
	q.Set("port", q.Get("port")+","+other.Get("port"))
	u.RawQuery = q.Encode()
	newClusterOf(t, func(cfg *daemon.ControllerConfig) { cfg.Database, cfg.AllowWeak = u.String(), nil })
	for c, want := range map[*pgcluster.Cluster]bool{refused: false, used: true} {
		conn, err := pgx.Connect(t.Context(), c.DSN("postgres"))
		if err != nil {
			t.Fatal(err)
		}
		var has bool
		err = conn.QueryRow(t.Context(), "SELECT to_regclass('schema_migrations') IS NOT NULL").Scan(&has)
		if err := errors.Join(err, conn.Close(t.Context())); err != nil || has != want {
			t.Errorf("a server that is used: %v, has a schema: %v, %v", want, has, err)
		}
	}
}
