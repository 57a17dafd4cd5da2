package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/internal/test/testpool"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// installation is what a platform team has, in small: a database, two controllers and a runner, each a process that can be killed
// alone. The runner lives in a network namespace of its own, as on another host.
type installation struct {
	dir         string
	key         string
	database    *pgcluster.Cluster
	pgConfig    pgcluster.Config
	pair        *testpg.Pair // has the database; nil: there is no standby
	controllers [2]*server
	runner      *server
	far         *farHost
	host        *stack // what the runner has on the host; its client is the first controller's

	parent coppice.WorkspaceID // runs from the beginning to the end, with a witness
	first  sight
	path   []string // the parent's
	acked  []acknowledged
}

// places is how many sandboxes the runner may have.
const places = 12

// acknowledged is a checkpoint that a client was told of, and what the witness had done in it.
type acknowledged struct {
	id   coppice.CheckpointID
	path []string
}

// server is a process of the program under test.
type server struct {
	name   string
	binary string
	args   []string
	netns  string // path; empty: the test's
	log    string // file

	cmd    *exec.Cmd
	ended  chan struct{}
	client *coppice.Client // of a controller
	ready  struct {
		Server, Runners string
		ClusterID       string `json:"cluster_id"`
		RunnerID        string `json:"runner_id"`
	}
}

// start runs the process until it says that it is ready. failpoints are armed in it alone.
func (s *server) start(failpoints string, more ...string) error {
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	out, in, err := os.Pipe()
	if err != nil {
		return err
	}
	defer out.Close()
	command := slices.Concat([]string{s.binary}, s.args, more)
	if s.netns != "" {
		command = append([]string{"nsenter", "--net=" + s.netns, "--"}, command...)
	}
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), failpointsVariable+"="+failpoints)
	cmd.Stdout, cmd.Stderr = in, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := startBound(cmd); err != nil {
		return err
	}
	_ = in.Close()
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // its state says it
		close(ended)
	}()
	s.cmd, s.ended = cmd, ended
	if err := json.NewDecoder(out).Decode(&s.ready); err != nil {
		return fmt.Errorf("the %s did not become ready: %w", s.name, err)
	}
	return nil
}

func (s *server) pid() int { return s.cmd.Process.Pid }

func (s *server) lives() bool {
	if s.cmd == nil {
		return false
	}
	select {
	case <-s.ended:
		return false
	default:
		return true
	}
}

// end sends a signal and waits for the end.
func (s *server) end(sig syscall.Signal) error {
	if !s.lives() {
		return nil
	}
	_ = s.cmd.Process.Signal(sig)
	select {
	case <-s.ended:
		return nil
	case <-time.After(stopPatience):
		_ = s.cmd.Process.Kill()
		<-s.ended
		return fmt.Errorf("the %s did not end within %s", s.name, stopPatience)
	}
}

func (s *server) kill() {
	if s.lives() {
		_ = s.cmd.Process.Kill()
		<-s.ended
	}
}

func (s *server) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil {
		t.Fatalf("signal %v to the %s: %v", sig, s.name, err)
	}
}

// awaitStopped waits until the process has stopped itself at a failpoint.
func (s *server) awaitStopped(t *testing.T) {
	t.Helper()
	until(t, "the "+s.name+" has stopped", func() (bool, error) {
		if !s.lives() {
			return false, fmt.Errorf("it has ended: %v", s.cmd.ProcessState)
		}
		state, err := processState(s.pid())
		return state == 'T', err
	})
}

// processState is the letter of /proc/PID/stat.
func processState(pid int) (byte, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	i := strings.LastIndexByte(string(b), ')')
	if i < 0 || i+2 >= len(b) {
		return 0, fmt.Errorf("strange state of process %d: %q", pid, b)
	}
	return b[i+2], nil
}

func (s *server) tail() string {
	b, err := os.ReadFile(s.log)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-24<<10):])
}

// farHost is the network namespace of the runner, joined to the test's by a pair of links.
type farHost struct {
	path      string
	near, far string // addresses
}

func newFarHost(t *testing.T) *farHost {
	t.Helper()
	l, err := testpool.NewLink()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return &farHost{path: l.Path, near: l.Near, far: l.Far}
}

// newInstallation starts all of it, with a workspace in which a witness runs and a checkpoint of that. It ends with the test and
// leaves nothing.
func newInstallation(t *testing.T) *installation {
	t.Helper()
	needVM(t)
	require.That(t, "netns", exec.Command("nsenter", "--version").Run() == nil, "apt-get install util-linux")
	began := time.Now()
	digest := baseImage(t)
	dir, err := os.MkdirTemp("", dirPrefix) //nolint:usetesting // the database's user must reach it, and t.TempDir is private
	if err != nil {
		t.Fatal(err)
	}
	in := &installation{dir: dir, far: newFarHost(t), host: &stack{dir: dir, data: filepath.Join(dir, "runner")}}
	t.Cleanup(func() { in.stop(t) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	binaries, err := pgcluster.Find(t.Context(), os.Getenv("PGBIN"))
	require.That(t, "postgres", err == nil, "make setup")
	disk := filepath.Join(dir, databaseDisk)
	if err := errors.Join(os.Mkdir(disk, 0o755), unix.Mount("coppice-e2e", disk, "tmpfs", 0, "size=384M,mode=0755")); err != nil {
		t.Fatal(err)
	}
	in.pgConfig = pgcluster.Config{Dir: filepath.Join(disk, "pg"), Binaries: binaries, Log: slog.New(slog.DiscardHandler), Durable: true}
	in.startDatabase(t)
	binary := program(t, "cmd/coppice")
	for i := range in.controllers {
		c := &server{name: fmt.Sprintf("controller-%d", i), binary: binary, log: filepath.Join(dir, fmt.Sprintf("controller-%d.log", i))}
		c.args = []string{
			"--json", "controller", "--database", in.database.DSN("postgres"), "--key-file", filepath.Join(dir, "cluster.key"),
			"--api-key-file", filepath.Join(dir, "api.key"), "--listen", freeAddress(t), "--runner-listen", net.JoinHostPort(in.far.near, port(freeAddress(t))),
			"--log-level", "debug",
		}
		in.controllers[i] = c
		in.startController(t, i, "")
	}
	in.host.client = in.controllers[0].client
	ticket, err := in.host.client.CreateRunnerToken(t.Context(), coppice.CreateRunnerTokenRequest{})
	if err != nil {
		t.Fatal(err)
	}
	token := filepath.Join(dir, "join-token")
	if err := os.WriteFile(token, []byte(ticket.Token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	in.runner = &server{name: "runner", binary: binary, netns: in.far.path, log: filepath.Join(dir, "runner.log"), args: []string{
		"--json", "runner", "--data-dir", in.host.data, "--images-dir", imageStore(t).Dir(), "--controller", in.controllers[0].ready.Runners,
		"--controller", in.controllers[1].ready.Runners, "--join-token-file", token, "--listen", in.far.far + ":7072", "--disk-budget", "1G",
		"--warm", "0", "--accel", "tcg", "--max-sandboxes", strconv.Itoa(places), "--log-level", "debug", "--stop-vms", "--allow-weak-host", weakHost,
	}}
	in.startRunner(t, "")
	mark := in.controllers[0].ready.ClusterID + "/" + in.runner.ready.RunnerID
	if err := os.WriteFile(filepath.Join(in.host.data, "cluster-id"), []byte(mark), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := in.host.learnNames(); err != nil {
		t.Fatal(err)
	}
	in.plant(t, string(digest))
	t.Logf("two controllers, a runner and a first machine run after %.1f s", time.Since(began).Seconds())
	return in
}

func port(address string) string {
	_, p, _ := net.SplitHostPort(address)
	return p
}

// plant makes the parent and the first checkpoint.
func (in *installation) plant(t *testing.T, image string) {
	t.Helper()
	ws, err := in.host.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Name: "parent", Image: image, Resources: small()})
	if err != nil {
		t.Fatal(err)
	}
	in.parent = ws.ID
	upload(t, in.host, ws.ID)
	in.first = startWitness(t, in.host, ws.ID)
	in.capture(t)
}

// capture takes a checkpoint of the parent and remembers that it was acknowledged.
func (in *installation) capture(t *testing.T) coppice.CheckpointID {
	t.Helper()
	c := checkpoint(t, in.host, in.parent)
	in.acknowledge(c.ID)
	return c.ID
}

// acknowledge notes that a checkpoint of the parent, as it is now, must be there for good.
func (in *installation) acknowledge(id coppice.CheckpointID) {
	in.acked = append(in.acked, acknowledged{id, slices.Clone(in.path)})
}

// step makes the parent's witness go on.
func (in *installation) step(t *testing.T, label string) {
	t.Helper()
	in.path = append(in.path, label)
	compare(t, "the parent, a step on", after(in.first, in.path...), step(t, in.host, in.parent, label))
}

func (in *installation) base() coppice.CheckpointID { return in.acked[0].id }

func (in *installation) startDatabase(t *testing.T) {
	t.Helper()
	// Not the test's context, which ends before its clean-up.
	ctx, cancel := later(t)
	defer cancel()
	var err error
	if in.database, err = pgcluster.Start(ctx, in.pgConfig); err != nil {
		t.Fatal(err)
	}
}

func (in *installation) startController(t *testing.T, i int, failpoints string, more ...string) {
	t.Helper()
	c := in.controllers[i]
	if err := c.start(failpoints, more...); err != nil {
		t.Fatalf("%v\n%s", err, c.tail())
	}
	if c.client != nil {
		return
	}
	key, err := os.ReadFile(filepath.Join(in.dir, "api.key"))
	if err != nil {
		t.Fatal(err)
	}
	in.key = strings.TrimSpace(string(key))
	if c.client, err = coppice.New(coppice.Config{Server: c.ready.Server, Token: in.key}); err != nil {
		t.Fatal(err)
	}
}

func (in *installation) startRunner(t *testing.T, failpoints string, more ...string) {
	t.Helper()
	if err := in.runner.start(failpoints, more...); err != nil {
		t.Fatalf("%v\n%s", err, in.runner.tail())
	}
}

// restartControllers starts both again with other arguments, or with those that they always have.
func (in *installation) restartControllers(t *testing.T, more ...string) {
	t.Helper()
	for i, c := range in.controllers {
		c.kill()
		in.startController(t, i, "", more...)
	}
}

// rearm kills a server and starts it with failpoints.
func (in *installation) rearm(t *testing.T, s *server, failpoints string) {
	t.Helper()
	s.kill()
	if err := s.start(failpoints); err != nil {
		t.Fatalf("%v\n%s", err, s.tail())
	}
}

// heal ends every fault: what is stopped goes on, what is dead is started.
func (in *installation) heal(t *testing.T) {
	t.Helper()
	in.far.mend(t)
	in.healDatabase(t)
	for _, s := range []*server{in.controllers[0], in.controllers[1], in.runner} {
		if s.lives() {
			s.signal(t, syscall.SIGCONT)
			continue
		}
		if err := s.start(""); err != nil {
			t.Fatalf("%v\n%s", err, s.tail())
		}
	}
}

// stop ends everything in order, with nothing left behind.
func (in *installation) stop(t *testing.T) {
	t.Helper()
	if r := in.runner; r != nil && r.cmd != nil {
		// One that ends its machines, whatever became of the last.
		_ = syscall.Kill(r.pid(), syscall.SIGCONT) // it may have ended
		if err := r.end(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := r.start(""); err != nil {
			t.Errorf("%v\n%s", err, r.tail())
		}
		if err := r.end(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
	}
	for _, c := range in.controllers {
		if c == nil || c.cmd == nil {
			continue
		}
		_ = syscall.Kill(c.pid(), syscall.SIGCONT) // likewise
		if err := c.end(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if c.client != nil {
			c.client.Close()
		}
	}
	if in.pair != nil {
		in.pair.End(t)
	} else if in.database != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		if err := in.database.Remove(ctx); err != nil {
			t.Error(err)
		}
	}
	_ = unix.Unmount(filepath.Join(in.dir, databaseDisk), 0) // it may not have come so far; what is still mounted cannot be removed
	if in.host.cluster != "" {
		for _, fault := range in.host.remains() {
			t.Error(fault)
		}
	}
	if err := os.RemoveAll(in.dir); err != nil {
		t.Error(err)
	}
}
