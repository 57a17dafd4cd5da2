package postgres_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/postgres/durability"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testpg"
)

const reload = "SELECT pg_reload_conf()"

// TestDurability reads the settings of a real server: those of the server, of a role and of a database.
func TestDurability(t *testing.T) {
	t.Parallel()
	c := testpg.Server(t, testpg.Changeable())
	for _, test := range []struct {
		name    string
		set     []string
		commits string
		weak    []string
	}{
		{"as installed", nil, durability.OnServer, nil},
		{"fsync off", []string{"ALTER SYSTEM SET fsync = off"}, durability.InMemory, []string{"fsync"}},
		{"half pages", []string{"ALTER SYSTEM SET full_page_writes = off"}, durability.OnServer, []string{"full_page_writes"}},
		{"asynchronous server", []string{"ALTER SYSTEM SET synchronous_commit = off"}, durability.InMemory, []string{"synchronous_commit"}},
		{"asynchronous role", []string{"ALTER ROLE postgres SET synchronous_commit = off"}, durability.InMemory, []string{"synchronous_commit"}},
		{"asynchronous database", []string{"ALTER DATABASE postgres SET synchronous_commit = off"}, durability.InMemory, []string{"synchronous_commit"}},
		{"a synchronous standby", []string{"ALTER SYSTEM SET synchronous_standby_names = 'other'"}, durability.OnStandby, nil},
		{"one that has received it", []string{"ALTER SYSTEM SET synchronous_standby_names = 'other'", "ALTER SYSTEM SET synchronous_commit = remote_write"}, durability.Received, nil},
		{"one that nobody waits for", []string{"ALTER SYSTEM SET synchronous_standby_names = 'other'", "ALTER SYSTEM SET synchronous_commit = local"}, durability.OnServer, nil},
		{"a standby without fsync", []string{"ALTER SYSTEM SET synchronous_standby_names = 'other'", "ALTER SYSTEM SET fsync = off"}, durability.InMemory, []string{"fsync"}},
	} {
		testpg.Exec(t, c, append(test.set, reload)...)
		var got durability.Report
		eventually.True(t, test.name+" is seen", func() bool { // a reload reaches a process when it looks
			got = inspect(t, c)
			return got.Commits() == test.commits && slices.Equal(got.Weak(), test.weak)
		})
		if got.Timeline != 1 || got.Recovers || got.Started == "" || got.Server != "socket" || got.Promise() == "" {
			t.Errorf("%s: the server is %+v", test.name, got)
		}
		for _, allowed := range [][]string{nil, {"fsync"}, {"full_page_writes"}, {"synchronous_commit"}, durability.Settings()} {
			refused := slices.ContainsFunc(test.weak, func(name string) bool { return !slices.Contains(allowed, name) })
			err := got.Judge(allowed)
			if (err != nil) != refused {
				t.Errorf("%s, with %v allowed: %v", test.name, allowed, err)
			}
			if refused && (core.CodeOf(err) != core.CodeDatabaseUnavailable || core.CategoryOf(err) != core.FailedPrecondition || !strings.Contains(err.Error(), "--allow-weak-database="+test.weak[0])) {
				t.Errorf("%s, with %v allowed: %v", test.name, allowed, err)
			}
		}
		testpg.Exec(t, c, "ALTER SYSTEM RESET ALL", "ALTER ROLE postgres RESET ALL", "ALTER DATABASE postgres RESET ALL", reload)
	}
}

// inspect asks a server on a new connection.
func inspect(t *testing.T, c *pgcluster.Cluster) durability.Report {
	t.Helper()
	var got durability.Report
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: c.DSN("postgres"), Check: func(d durability.Report) error {
		got = d
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	d, err := store.Inspect(t.Context())
	if err != nil || d != got {
		t.Fatalf("a new connection said %+v, and then %+v: %v", got, d, err)
	}
	return d
}

// TestCheckIsAsked: a server that is refused is used by nobody, on new connections at once and on open ones after Recheck.
func TestCheckIsAsked(t *testing.T) {
	t.Parallel()
	c := testpg.Server(t, testpg.Changeable())
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: c.DSN("postgres"), Check: func(d durability.Report) error { return d.Judge(nil) }})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	testpg.Exec(t, c, "CREATE ROLE coppice_app")
	work := func() error {
		return store.InTx(t.Context(), controller.System(), func(tx controller.AllTx) error {
			_, err := tx.Transaction(t.Context())
			return err
		})
	}
	if err := work(); err != nil {
		t.Fatal(err)
	}
	testpg.Exec(t, c, "ALTER SYSTEM SET fsync = off", reload)
	eventually.True(t, "the open connection is refused", func() bool {
		_, err := store.Inspect(t.Context())
		return core.CodeOf(err) == core.CodeDatabaseUnavailable
	})
	store.Recheck()
	if err := work(); core.CodeOf(err) != core.CodeDatabaseUnavailable || !strings.Contains(core.MessageOf(err), "fsync") {
		t.Errorf("work on a server without fsync: %v", err)
	}
	if err := store.Listen(t.Context(), nil, nil); core.CodeOf(err) != core.CodeDatabaseUnavailable {
		t.Errorf("listening to a server without fsync: %v", err)
	}
	testpg.Exec(t, c, "ALTER SYSTEM RESET fsync", reload)
	eventually.True(t, "the server is used again", func() bool { return work() == nil })
}
