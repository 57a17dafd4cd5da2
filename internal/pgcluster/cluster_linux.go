package pgcluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/osthread"
)

const (
	maxLogBytes   = 10 << 20 // a bigger log is moved aside at the next start
	readyInterval = 10 * time.Millisecond
	killGrace     = 5 * time.Second
)

// Cluster is a running server.
type Cluster struct {
	cfg  Config
	lay  layout
	lock *os.File // held until the server has ended

	process *os.Process
	done    chan struct{} // closed when the server has ended and err is set
	err     error
}

// Start makes the cluster if it is not there, ends what a dead owner left running, starts the server and returns when
// it answers. ctx bounds the start only: a running server lives until Stop, or until the calling process ends.
// A directory that another process uses is a STATE_CONFLICT error; a host that cannot run it INCOMPATIBLE_HOST.
func Start(ctx context.Context, cfg Config) (_ *Cluster, err error) {
	if !filepath.IsAbs(cfg.Dir) {
		return nil, fmt.Errorf("postgres directory %q is not absolute", cfg.Dir)
	}
	if cfg.MaxConnections == 0 {
		cfg.MaxConnections = 100
	}
	lay, err := prepare(cfg)
	if err != nil {
		return nil, fmt.Errorf("prepare postgres directory %s: %w", cfg.Dir, err)
	}
	lock, err := acquire(lay.lock)
	if err != nil {
		return nil, err
	}
	c := &Cluster{cfg: cfg, lay: lay, lock: lock, done: make(chan struct{})}
	defer func() {
		if err != nil && c.process == nil {
			err = errors.Join(err, giveUp(lock))
		}
	}()
	if err := c.matchVersion(ctx); err != nil {
		return nil, err
	}
	if err := endOrphans(ctx, lay.data, cfg.Log); err != nil {
		return nil, err
	}
	if err := lay.removeStale(); err != nil {
		return nil, err
	}
	began := time.Now()
	if err := c.initialise(ctx); err != nil {
		return nil, err
	}
	if err := c.launch(); err != nil {
		return nil, err
	}
	if err := c.awaitReady(ctx); err != nil {
		stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killGrace)
		defer cancel()
		return nil, errors.Join(err, c.end(stopCtx, syscall.SIGQUIT))
	}
	cfg.Log.InfoContext(ctx, "postgres started", "version", cfg.Binaries.Version, "pid", c.process.Pid,
		"dir", cfg.Dir, "user", lay.user.name, "duration_ms", core.Milliseconds(time.Since(began)))
	return c, nil
}

// DSN returns the URL by which the superuser connects to the named database.
func (c *Cluster) DSN(database string) string { return dsn(c.lay.run, database) }

// PID returns the server's process id.
func (c *Cluster) PID() int { return c.process.Pid }

// Done is closed when the server has ended, asked to or not.
func (c *Cluster) Done() <-chan struct{} { return c.done }

// Err says, after Done, why a server ended by itself; it is nil after a clean shutdown.
func (c *Cluster) Err() error {
	<-c.done
	return c.err
}

// Stop ends the server and returns when it is gone. A durable one writes its checkpoint first; when ctx ends before
// that is done, it is ended at once and recovers at its next start. Stopping a stopped server does nothing.
func (c *Cluster) Stop(ctx context.Context) error {
	select {
	case <-c.done:
		return c.err
	default:
	}
	signal := syscall.SIGINT // fast: roll back sessions, write a checkpoint, exit
	if !c.cfg.Durable {
		signal = syscall.SIGQUIT // immediate
	}
	if err := c.end(ctx, signal); err != nil {
		return fmt.Errorf("stop postgres in %s: %w", c.cfg.Dir, err)
	}
	c.cfg.Log.InfoContext(ctx, "postgres stopped", "dir", c.cfg.Dir)
	return nil
}

// Remove stops the server at once and deletes its directory.
func (c *Cluster) Remove(ctx context.Context) error {
	err := c.end(ctx, syscall.SIGQUIT)
	return errors.Join(err, c.lay.remove(c.cfg.Dir))
}

// end signals the server and waits; past ctx it uses the harder means, and waits for each.
func (c *Cluster) end(ctx context.Context, signal syscall.Signal) error {
	giveUp := ctx.Done()
	for _, s := range []syscall.Signal{signal, syscall.SIGQUIT, syscall.SIGKILL} {
		if err := c.process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return err
		}
		select {
		case <-c.done:
			return nil
		case <-giveUp:
		}
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), killGrace)
		defer cancel()
		giveUp = grace.Done()
	}
	<-c.done // after SIGKILL the kernel ends it
	return nil
}

// matchVersion makes sure that the programs fit a cluster that is there already.
func (c *Cluster) matchVersion(ctx context.Context) error {
	raw, err := os.ReadFile(filepath.Join(c.lay.data, "PG_VERSION"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	major, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil {
		return core.Wrapf(err, core.DataLoss, core.CodeInternal, "%s is damaged: its PG_VERSION is not a number", c.lay.data)
	}
	if major == c.cfg.Binaries.Major {
		return nil
	}
	c.cfg.Binaries, err = FindMajor(ctx, filepath.Dir(c.cfg.Binaries.Postgres), major)
	if err != nil {
		return fmt.Errorf("%s was made by PostgreSQL %d: %w", c.lay.data, major, err)
	}
	return nil
}

// launch starts the server on an OS thread that is kept for it until it ends.
func (c *Cluster) launch() error {
	log, err := c.openLog()
	if err != nil {
		return err
	}
	defer log.Close() // the server has its own descriptor
	started := make(chan error, 1)
	osthread.Go(func() { c.hold(c.command(log), started) })
	if err := <-started; err != nil {
		return fmt.Errorf("start postgres: %w", err)
	}
	return nil
}

// hold starts the server, reports that, and waits for its end.
func (c *Cluster) hold(cmd *exec.Cmd, started chan<- error) {
	err := makeReachable(c.lay.user, c.cfg.Binaries.Postgres, []string{c.lay.data, c.lay.run})
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		started <- err
		return
	}
	c.process = cmd.Process
	started <- nil
	// The lock is released before done is closed, so that a caller that saw the end may start again.
	c.err = errors.Join(endedBy(cmd.Wait()), giveUp(c.lock))
	close(c.done)
}

func (c *Cluster) command(log *os.File) *exec.Cmd {
	args := append([]string{"-D", c.lay.data}, c.settings()...)
	cmd := exec.Command(c.cfg.Binaries.Postgres, args...) //nolint:gosec,noctx // G204: our own programs; it must outlive the start's context
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env, cmd.Dir = serverEnv(), "/"
	death := syscall.SIGINT
	if !c.cfg.Durable {
		death = syscall.SIGQUIT
	}
	cmd.SysProcAttr = c.lay.user.attributes(death)
	return cmd
}

// settings are given on the command line: the files in the data directory stay as initdb wrote them.
func (c *Cluster) settings() []string {
	onOff := map[bool]string{true: "on", false: "off"}[c.cfg.Durable]
	all := map[string]string{
		"unix_socket_directories": c.lay.run, "unix_socket_permissions": "0700", "port": port,
		"max_connections": strconv.Itoa(c.cfg.MaxConnections), "logging_collector": "off", "log_checkpoints": "off",
		"fsync": onOff, "synchronous_commit": onOff, "full_page_writes": onOff,
	}
	maps.Copy(all, c.cfg.Settings)
	args := []string{"-c", "listen_addresses="}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if all[name] != "" {
			args = append(args, "-c", name+"="+all[name])
		}
	}
	return args
}

// initialise makes the cluster beside its final place, so that a half-made one is never taken for whole.
func (c *Cluster) initialise(ctx context.Context) error {
	if _, err := os.Stat(c.lay.data); err == nil {
		return nil
	}
	if err := privateDir(c.lay.fresh, c.lay.user); err != nil {
		return err
	}
	args := []string{"-D", c.lay.fresh, "-U", Superuser, "-A", "trust", "--locale=C", "-E", "UTF8"}
	if !c.cfg.Durable {
		args = append(args, "--no-sync")
	}
	err := osthread.Do(func() error {
		if err := makeReachable(c.lay.user, c.cfg.Binaries.Initdb, []string{c.lay.fresh}); err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, c.cfg.Binaries.Initdb, args...) //nolint:gosec // G204: our own programs
		cmd.Env, cmd.Dir = serverEnv(), "/"
		cmd.SysProcAttr = c.lay.user.attributes(syscall.SIGKILL)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		return nil
	})
	if err != nil {
		return core.Wrapf(err, core.FailedPrecondition, core.CodeIncompatibleHost,
			"initdb could not make a PostgreSQL cluster in %s as user %s", c.lay.data, c.lay.user.name)
	}
	return atomicfile.Rename(c.lay.fresh, c.lay.data)
}

func serverEnv() []string {
	return []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "TZ=UTC"}
}

// awaitReady asks until the server answers. There is nothing to subscribe to that every build offers.
func (c *Cluster) awaitReady(ctx context.Context) error {
	tick := time.NewTicker(readyInterval)
	defer tick.Stop()
	var last error
	for {
		conn, err := pgx.Connect(ctx, c.DSN("postgres"))
		if err == nil {
			return conn.Close(ctx)
		}
		last = err
		select {
		case <-tick.C:
		case <-c.done:
			return core.Wrapf(fmt.Errorf("%w\n%s", c.err, c.logTail()), core.Unavailable, core.CodeDatabaseUnavailable,
				"the private PostgreSQL in %s ended while starting; its log is %s", c.cfg.Dir, c.lay.log)
		case <-ctx.Done():
			return core.Wrapf(errors.Join(last, context.Cause(ctx)), core.Unavailable, core.CodeDatabaseUnavailable,
				"the private PostgreSQL in %s did not answer in time; its log is %s", c.cfg.Dir, c.lay.log)
		}
	}
}

func (c *Cluster) openLog() (*os.File, error) {
	if fi, err := os.Stat(c.lay.log); err == nil && fi.Size() > maxLogBytes {
		if err := os.Rename(c.lay.log, c.lay.log+".1"); err != nil {
			return nil, err
		}
	}
	return os.OpenFile(c.lay.log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
}

// logTail returns the end of the log, for an error.
func (c *Cluster) logTail() string {
	const tail = 2000
	b, err := os.ReadFile(c.lay.log)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-tail):])
}

// endedBy turns the server's exit into an error; a clean shutdown is none.
func endedBy(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("postgres ended: %w", err)
}

// giveUp releases a lock that acquire took. Closing alone would not: a child that another goroutine has just forked holds a copy of the
// descriptor until it has become its program.
func giveUp(lock *os.File) error {
	_ = unlock(lock) // closing does it too, a moment later at worst
	return lock.Close()
}

func unlock(lock *os.File) error {
	raw, err := lock.SyscallConn()
	if err != nil {
		return err
	}
	failed := raw.Control(func(fd uintptr) { err = unix.Flock(int(fd), unix.LOCK_UN) })
	return errors.Join(failed, err)
}

// acquire takes the lock that makes a process the owner of the directory.
func acquire(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, core.Errorf(core.Conflict, core.CodeStateConflict,
				"another process runs PostgreSQL in %s; stop it first", filepath.Dir(path))
		}
		return nil, err
	}
	return f, nil
}
