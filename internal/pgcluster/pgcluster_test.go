//go:build linux

package pgcluster

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testprog"
)

const ownerEnv = "PGCLUSTER_TEST_OWNER" // makes the test binary an owner of a cluster that waits to be killed

func TestMain(m *testing.M) {
	if dir := os.Getenv(ownerEnv); dir != "" {
		own(dir)
		return
	}
	testleak.Main(m)
}

// own starts a durable cluster in dir, prints the server's process id, and waits for its standard input to close.
func own(dir string) {
	bins, err := Find(context.Background(), "")
	if err == nil {
		var c *Cluster
		c, err = Start(context.Background(), Config{Dir: dir, Binaries: bins, Durable: true, Log: slog.New(slog.DiscardHandler)})
		if err == nil {
			fmt.Println(c.PID())
			_, _ = io.Copy(io.Discard, os.Stdin)
		}
	}
	fmt.Println(err)
}

func config(t *testing.T, dir string) Config {
	t.Helper()
	bins, err := Find(t.Context(), os.Getenv("PGBIN"))
	require.That(t, "postgres", err == nil, core.MessageOf(err))
	return Config{Dir: dir, Binaries: bins, Durable: true, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
}

func start(t *testing.T, cfg Config) *Cluster {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := Start(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Remove(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return c
}

func query[T any](t *testing.T, c *Cluster, sql string) T {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), c.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	var v T
	if err := conn.QueryRow(t.Context(), sql).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

const write = `WITH n AS (SELECT lo_from_bytea(0, 'kept') AS id) SELECT id::bigint FROM n` // a commit without DDL

func objects(t *testing.T, c *Cluster) int {
	t.Helper()
	return query[int](t, c, `SELECT count(*) FROM pg_largeobject_metadata`)
}

func stop(t *testing.T, c *Cluster) {
	t.Helper()
	if err := c.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestLifecycle(t *testing.T) {
	t.Parallel()
	for _, durable := range []bool{true, false} {
		t.Run(fmt.Sprintf("durable %v", durable), func(t *testing.T) {
			t.Parallel()
			cfg := config(t, filepath.Join(t.TempDir(), "pg"))
			cfg.Durable = durable
			c := start(t, cfg)
			want := map[bool]string{true: "on", false: "off"}[durable]
			if got := query[string](t, c, "SHOW fsync"); got != want {
				t.Errorf("fsync is %q, want %q", got, want)
			}
			if got := query[string](t, c, "SHOW listen_addresses"); got != "" {
				t.Errorf("the server listens on %q, want no TCP", got)
			}
			query[int64](t, c, write)
			if durable {
				stop(t, c)
				stop(t, c)
				if err := c.Err(); err != nil {
					t.Errorf("a clean stop left %v", err)
				}
				c = start(t, cfg)
				if got := objects(t, c); got != 1 {
					t.Errorf("%d objects after a restart, want 1", got)
				}
			}
			if err := c.Remove(t.Context()); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(cfg.Dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the directory is still there: %v", err)
			}
		})
	}
}

func TestNotRoot(t *testing.T) {
	t.Parallel()
	require.Root(t)
	nobody, err := user.Lookup("nobody")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "pgcluster") //nolint:usetesting // t.TempDir's parent is closed to others
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	uid, _ := strconv.ParseUint(nobody.Uid, 10, 32)
	gid, _ := strconv.ParseUint(nobody.Gid, 10, 32)
	if err := errors.Join(os.Chmod(dir, 0o755), os.Mkdir(filepath.Join(dir, "t"), 0o700), os.Chown(filepath.Join(dir, "t"), int(uid), int(gid))); err != nil {
		t.Fatal(err)
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "test")
	testprog.Write(t, program, self)
	cmd := exec.CommandContext(t.Context(), program, "-test.run=^(TestLifecycle|TestKilledServer)$", "-test.v")
	cmd.Env = append(os.Environ(), "TMPDIR="+filepath.Join(dir, "t"), "HOME="+dir)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Count(string(out), "--- PASS") < 2 {
		t.Errorf("as nobody: %v\n%s", err, out)
	}
}

func TestReachableDirectoryNeedsNoNamespace(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir, err := os.MkdirTemp("", "pgcluster") //nolint:usetesting // t.TempDir's parent is closed to others
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	namespace := func(pid string) string {
		ns, err := os.Readlink("/proc/" + pid + "/ns/mnt")
		if err != nil {
			t.Fatal(err)
		}
		return ns
	}
	open := start(t, config(t, filepath.Join(dir, "pg")))
	if got, want := namespace(strconv.Itoa(open.PID())), namespace("self"); got != want {
		t.Errorf("server in %s, want ours, %s", got, want)
	}
	closed := start(t, config(t, filepath.Join(t.TempDir(), "pg")))
	if got := namespace(strconv.Itoa(closed.PID())); got == namespace("self") {
		t.Error("a server behind a closed directory is in our mount namespace")
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || bytes.Contains(mounts, []byte(closed.lay.data)) {
		t.Errorf("its mounts are seen in ours (%v):\n%s", err, mounts)
	}
}

func TestKilledServer(t *testing.T) {
	t.Parallel()
	cfg := config(t, filepath.Join(t.TempDir(), "pg"))
	c := start(t, cfg)
	query[int64](t, c, write)
	if err := syscall.Kill(c.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	if err := c.Err(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("a killed server ended with %v, want the signal named", err)
	}
	again := start(t, cfg)
	if got := objects(t, again); got != 1 {
		t.Errorf("%d objects after kill -9, want 1", got)
	}
}

func TestKilledOwner(t *testing.T) {
	t.Parallel()
	cfg := config(t, filepath.Join(t.TempDir(), "pg"))
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), ownerEnv+"="+cfg.Dir)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatalf("the owner said %q", line)
	}

	_, err = Start(t.Context(), cfg)
	if core.CodeOf(err) != core.CodeStateConflict {
		t.Errorf("a second owner got %v, want %s", err, core.CodeStateConflict)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if err := awaitExit(t.Context(), []int{fd}, time.Minute); err != nil {
		t.Fatalf("the server outlived its owner: %v", err)
	}
	if _, err := os.Stat(filepath.Join(cfg.Dir, "data", pidFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the server did not shut down cleanly: %s: %v", pidFile, err)
	}
	start(t, cfg)
}

func TestOrphanIsEnded(t *testing.T) {
	t.Parallel()
	cfg := config(t, filepath.Join(t.TempDir(), "pg"))
	orphan := start(t, cfg)
	query[int64](t, orphan, write)
	if err := unlock(orphan.lock); err != nil { // as if the owner were gone and the death signal had not come
		t.Fatal(err)
	}
	c := start(t, cfg)
	<-orphan.Done()
	if got := objects(t, c); got != 1 {
		t.Errorf("%d objects after taking over, want 1", got)
	}
}

func TestStalePIDFile(t *testing.T) {
	t.Parallel()
	cfg := config(t, filepath.Join(t.TempDir(), "pg"))
	c := start(t, cfg)
	stop(t, c)
	// A process of the server's own user, which got the recycled id: PostgreSQL alone would refuse to start.
	stranger := exec.CommandContext(t.Context(), "sleep", "600")
	stranger.SysProcAttr = c.lay.user.attributes(syscall.SIGKILL)
	if err := stranger.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stranger.Process.Kill(); _ = stranger.Wait() }()
	stale := fmt.Sprintf("%d\n%s\n1\n%s\n%s\n\n\nready\n", stranger.Process.Pid, c.lay.data, port, c.lay.run)
	for _, path := range []string{filepath.Join(c.lay.data, pidFile), filepath.Join(c.lay.run, ".s.PGSQL."+port+".lock")} {
		if err := errors.Join(os.WriteFile(path, []byte(stale), 0o600), os.Chown(path, c.lay.user.uid, c.lay.user.gid)); err != nil {
			t.Fatal(err)
		}
	}
	start(t, cfg)
	if err := stranger.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the stranger is gone: %v", err)
	}
}

func TestHalfMadeClusterIsMadeAgain(t *testing.T) {
	t.Parallel()
	cfg := config(t, filepath.Join(t.TempDir(), "pg"))
	if err := os.MkdirAll(filepath.Join(cfg.Dir, "data.new", "base"), 0o700); err != nil {
		t.Fatal(err)
	}
	start(t, cfg)
	if _, err := os.Stat(filepath.Join(cfg.Dir, "data.new")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("data.new is still there: %v", err)
	}
}

func TestLongPath(t *testing.T) {
	t.Parallel()
	cfg := config(t, filepath.Join(t.TempDir(), strings.Repeat("long", 30), "pg"))
	c := start(t, cfg)
	if len(c.lay.run) > 100 {
		t.Errorf("the socket is in %s", c.lay.run)
	}
	query[int](t, c, "SELECT 1")
	if err := c.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(c.lay.run); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket directory is still there: %v", err)
	}
}

func TestPlantedSocketDirectory(t *testing.T) {
	t.Parallel()
	cfg := config(t, filepath.Join(t.TempDir(), "pg"))
	if err := os.MkdirAll(filepath.Join(cfg.Dir, "run"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Start(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "not a private directory") {
		t.Errorf("got %v, want a refusal", err)
	}
}

func TestForeignVersion(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]string{"9\n": "install postgresql-9", "x": "PG_VERSION is not a number"} {
		cfg := config(t, filepath.Join(t.TempDir(), "pg"))
		data := filepath.Join(cfg.Dir, "data")
		if err := errors.Join(os.MkdirAll(data, 0o700), os.WriteFile(filepath.Join(data, "PG_VERSION"), []byte(version), 0o600)); err != nil {
			t.Fatal(err)
		}
		if _, err := Start(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("version %q: got %v, want %q", version, err, want)
		}
	}
}

func TestBrokenServerShowsItsLog(t *testing.T) {
	t.Parallel()
	cfg := config(t, filepath.Join(t.TempDir(), "pg"))
	c := start(t, cfg)
	stop(t, c)
	conf := filepath.Join(c.lay.data, "postgresql.conf")
	if err := os.WriteFile(conf, []byte("no_such_setting = 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Start(t.Context(), cfg)
	if core.CodeOf(err) != core.CodeDatabaseUnavailable || !strings.Contains(err.Error(), "no_such_setting") {
		t.Errorf("got %v, want %s with the log's reason", err, core.CodeDatabaseUnavailable)
	}
}

func TestCancelledStartLeavesNothingRunning(t *testing.T) {
	t.Parallel()
	cfg := config(t, filepath.Join(t.TempDir(), "pg"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Start(ctx, cfg); err == nil {
		t.Fatal("a cancelled start succeeded")
	}
	start(t, cfg)
}

func TestNoPrograms(t *testing.T) {
	t.Parallel()
	_, err := inspectAll(t.Context(), []string{t.TempDir()})
	if core.CodeOf(err) != core.CodeIncompatibleHost || !strings.Contains(core.MessageOf(err), "apt-get install") {
		t.Errorf("got %v, want %s with the cure", err, core.CodeIncompatibleHost)
	}
	if _, err := Start(t.Context(), Config{Dir: "relative"}); err == nil {
		t.Error("a relative directory was accepted")
	}
}

func TestPlacesPreferTheHintThenTheNewest(t *testing.T) {
	t.Parallel()
	dirs, err := places("/opt/pg/bin")
	if err != nil || len(dirs) == 0 || dirs[0] != "/opt/pg/bin" {
		t.Errorf("places = %v, %v; want the hint first", dirs, err)
	}
	var got []int
	for _, d := range []string{"/usr/lib/postgresql/9.6/bin", "/usr/lib/postgresql/17/bin"} {
		got = append(got, majorOfDir(d))
	}
	if diff := cmp.Diff([]int{0, 17}, got); diff != "" {
		t.Error(diff)
	}
}
