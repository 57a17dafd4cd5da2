package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// configure sets parameters of the database, or takes them back, as an administrator does.
func (in *installation) configure(t *testing.T, statements ...string) {
	t.Helper()
	ctx, cancel := later(t)
	defer cancel()
	conn, err := pgx.Connect(ctx, in.database.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(ctx) }()
	for _, s := range append(statements, "SELECT pg_reload_conf()") {
		if _, err := conn.Exec(ctx, s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// counter writes 1, 2, 3 and so on into an annotation of the base, each with a commit of its own, as long as it is let.
type counter struct {
	in   *installation
	i    int // of the controller
	told int // the last that was acknowledged
	pad  string
	errs []error // what it was told instead
}

const counterKey = "count"

// write tries the next number until it is acknowledged or ctx ends. After an error the number may be there or not.
func (c *counter) write(ctx context.Context) {
	client := c.in.controllers[c.i].client
	for ctx.Err() == nil {
		now, err := client.Checkpoint(ctx, c.in.base())
		if err == nil {
			_, err = client.PatchCheckpoint(ctx, now.ID, coppice.PatchCheckpointRequest{
				Version: now.Version, Annotations: coppice.Annotations{counterKey: float64(c.told + 1), "pad": c.pad},
			})
		}
		if err == nil {
			c.told++
			return
		}
		if ctx.Err() == nil {
			c.errs = append(c.errs, err)
		}
		hold(20 * time.Millisecond)
	}
}

// check wants the last acknowledged number to be there, or the one that was under way, and every error to say that the database is
// away and that it can be tried again.
func (c *counter) check(t *testing.T) {
	t.Helper()
	got, err := c.in.controllers[c.i].client.Checkpoint(t.Context(), c.in.base())
	if err != nil {
		t.Fatal(err)
	}
	n, _ := got.Annotations[counterKey].(float64)
	if int(n) < c.told || int(n) > c.told+1 {
		t.Errorf("%d writes were acknowledged, and there is number %v", c.told, n)
	}
	c.told = int(n)
	for _, err := range c.errs {
		var e *coppice.Error
		if !errors.As(err, &e) || e.Status != 503 || e.Code != coppice.CodeDatabaseUnavailable {
			t.Errorf("a write was told %v, want 503 %s", err, coppice.CodeDatabaseUnavailable)
			break
		}
	}
	t.Logf("%d writes were acknowledged, %d refused", c.told, len(c.errs))
	c.errs = nil
}

// killDatabaseInCommit kills PostgreSQL while a writer and a fork commit. Commits are slow, so that it dies in the middle of one.
func killDatabaseInCommit(t *testing.T, in *installation) {
	t.Helper()
	in.configure(t, "ALTER SYSTEM SET commit_siblings = 0", "ALTER SYSTEM SET commit_delay = 100000")
	t.Cleanup(func() { in.configure(t, "ALTER SYSTEM RESET commit_siblings", "ALTER SYSTEM RESET commit_delay") })
	c := &counter{in: in}
	for round := range 3 {
		ctx, stop := context.WithCancel(t.Context())
		var writer sync.WaitGroup
		writer.Go(func() {
			for ctx.Err() == nil {
				c.write(ctx)
			}
		})
		before := c.told
		within(t, time.Minute, "some writes are acknowledged", func() (bool, error) {
			got, err := in.host.client.Checkpoint(t.Context(), in.base())
			n, _ := got.Annotations[counterKey].(float64)
			return int(n) > before+2, err
		})
		key := fmt.Sprintf("commit-%d", round)
		made := in.beginFork(t, round%2, key)
		// At another place of a fork's transactions each time.
		hold(time.Duration(round*150+50) * time.Millisecond)
		if err := syscall.Kill(in.database.PID(), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		<-in.database.Done()
		hold(500 * time.Millisecond)
		in.startDatabase(t)
		in.converge(t, time.Now())
		stop()
		writer.Wait()
		c.check(t)
		first := <-made
		told, err := in.forkAs(t.Context(), (round+1)%2, key)
		if err != nil {
			t.Fatalf("the fork, asked for again: %v; at first the client was told %v", err, first.err)
		}
		if first.err == nil && strings.Join(ids(first.result), " ") != strings.Join(ids(told), " ") {
			t.Errorf("the fork was %q, and asked for again it is %q", ids(first.result), ids(told))
		}
		in.checkFork(t, key, told)
	}
}

// databaseAway kills PostgreSQL for longer than the soft lease of runners.
func databaseAway(t *testing.T, in *installation) {
	t.Helper()
	const away = 20 * time.Second
	m := in.host.mustMachine(t, in.parent)
	if err := syscall.Kill(in.database.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-in.database.Done()
	refused := 0
	for began := time.Now(); time.Since(began) < away; refused++ {
		_, err := in.host.client.CreateCheckpoint(t.Context(), in.parent, coppice.CreateCheckpointRequest{})
		if e := wantCode(t, err, coppice.CodeDatabaseUnavailable); e.Status != 503 {
			t.Errorf("a checkpoint without a database: %v", e)
		}
		hold(time.Second)
	}
	if _, ok := in.host.vmms()[m.pid]; !ok {
		t.Error("the machine died with the database")
	}
	t.Logf("%d requests were refused", refused)
	in.startDatabase(t)
	in.converge(t, time.Now())
	if now := in.host.mustMachine(t, in.parent); now.pid != m.pid {
		t.Errorf("the parent's VMM was %d and is %d", m.pid, now.pid)
	}
}

// databaseTakesNoWrites makes it read-only, and then its disk full.
func databaseTakesNoWrites(t *testing.T, in *installation) {
	t.Helper()
	rows := func() []string {
		return in.sql(t, `SELECT id FROM checkpoints UNION ALL SELECT id FROM operations UNION ALL SELECT id FROM workspaces`)
	}
	in.configure(t, "ALTER SYSTEM SET default_transaction_read_only = on")
	writable := func() { in.configure(t, "ALTER SYSTEM RESET default_transaction_read_only") }
	defer writable()
	for i, c := range in.controllers {
		// A session of the controller may read the new setting later than this test: it takes the request, and refuses what follows.
		within(t, convergence, "a refused request leaves no rows", func() (bool, error) {
			before := rows()
			_, err := c.client.CreateCheckpoint(t.Context(), in.parent, coppice.CreateCheckpointRequest{})
			if err == nil {
				return false, nil
			}
			if e := wantCode(t, err, coppice.CodeDatabaseUnavailable); e.Status != 503 || !strings.Contains(e.Detail, "takes no writes") {
				t.Errorf("controller %d, read-only: %v", i, e)
			}
			return slices.Equal(before, rows()), nil
		})
		if w, err := c.client.Workspace(t.Context(), in.parent); err != nil || w.ID != in.parent {
			t.Errorf("controller %d cannot read from a database that is read-only: %v", i, err)
		}
	}
	writable()
	in.converge(t, time.Now())

	c := &counter{in: in, pad: strings.Repeat("x", 4<<10)}
	c.write(t.Context())
	filler := filepath.Join(in.dir, databaseDisk, "filler")
	fill(t, filler)
	const most = 30 * time.Second // until what PostgreSQL has in hand is used up
	ctx, cancel := context.WithTimeout(t.Context(), most)
	defer cancel()
	for ctx.Err() == nil && len(c.errs) < 3 {
		c.pad = strings.Repeat(fmt.Sprint(c.told%10), 4<<10)
		short, done := context.WithTimeout(ctx, 5*time.Second)
		c.write(short)
		done()
	}
	if len(c.errs) == 0 {
		t.Errorf("%d writes to a full disk were acknowledged, and none refused", c.told)
	}
	acknowledged, err := in.host.client.CreateCheckpoint(t.Context(), in.parent, coppice.CreateCheckpointRequest{})
	if err != nil { // small rows may find room in pages that are there
		if e := wantCode(t, err, coppice.CodeDatabaseUnavailable); e.Status != 503 {
			t.Errorf("a checkpoint without room for its row: %v", e)
		}
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	in.healDatabase(t)
	in.converge(t, time.Now())
	c.check(t)
	if acknowledged.ID != "" {
		if _, err := in.host.client.Checkpoint(t.Context(), acknowledged.ID); err != nil {
			t.Errorf("a checkpoint that was acknowledged on the full disk: %v", err)
		}
	}
}

// databaseDisk is where the database's files are: a small file system of their own.
const databaseDisk = "pgdisk"

// healDatabase starts PostgreSQL if it has ended. It may be about to.
func (in *installation) healDatabase(t *testing.T) {
	t.Helper()
	within(t, convergence, "the database answers", func() (bool, error) {
		select {
		case <-in.database.Done():
			in.startDatabase(t)
		default:
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		conn, err := pgx.Connect(ctx, in.database.DSN("postgres"))
		if err != nil {
			return false, nil
		}
		return true, conn.Close(ctx)
	})
}

// fill takes all the room of a file system, to the last block.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	t.Cleanup(func() { _ = os.Remove(path) }) // it may be gone
	for block := 1 << 20; block >= 512; {
		if _, err := f.Write(bytes.Repeat([]byte{1}, block)); errors.Is(err, syscall.ENOSPC) {
			block /= 2
		} else if err != nil {
			t.Fatal(err)
		}
	}
}
