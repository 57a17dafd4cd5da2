package daemon_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/apitest"
	"github.com/coppice-dev/coppice/controller/postgres/durability"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/confine/confinetest"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/test/memdir"
	"github.com/coppice-dev/coppice/internal/test/testaddr"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/migrations"
	"github.com/coppice-dev/coppice/runner/fakenet"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The variables by which this test binary becomes a server: real processes, which can be killed, without virtual machines.
const (
	roleVariable   = "COPPICE_TEST_ROLE"
	configVariable = "COPPICE_TEST_CONFIG"
)

// watchdog ends what would hang; nothing that is tested depends on it.
const watchdog = 3 * time.Minute

func TestMain(m *testing.M) {
	daemon.EnterConfined()
	confinetest.AllowWithoutRoot(m)
	if role := os.Getenv(roleVariable); role != "" {
		if err := serve(role); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", core.CodeOf(err), err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if err := memdir.Use(); err != nil {
		panic(err)
	}
	var err error
	if buildDir, err = os.MkdirTemp("", "coppice-daemon-"); err != nil {
		panic(err)
	}
	testleak.Main(building{m}, testpg.Leak())
}

type building struct{ *testing.M }

func (b building) Run() int {
	status := b.M.Run()
	_ = os.RemoveAll(buildDir) // the tests' verdict is known
	return status
}

// buildDir is where the coppice that is tested is built, if a test needs it.
var buildDir string

// serverConfig travels to the server's process.
type serverConfig struct {
	Controller daemon.ControllerConfig
	Runner     daemon.RunnerConfig
	RunDir     string
	Failpoints string          // armed in the server's process
	VMM        vmm.Fingerprint // what the runner's fake machines run on
}

func serve(role string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var cfg serverConfig
	if err := json.Unmarshal([]byte(os.Getenv(configVariable)), &cfg); err != nil {
		return err
	}
	if err := failpoint.ArmList(cfg.Failpoints); err != nil {
		return err
	}
	log := slog.New(core.LogHandler(slog.NewTextHandler(os.Stderr, nil)))
	out := json.NewEncoder(os.Stdout)
	if role == "controller" {
		cfg.Controller.Log = log
		return daemon.RunController(ctx, cfg.Controller, func(r daemon.ControllerReady) error { return out.Encode(r) })
	}
	store, err := imageStore(ctx, filepath.Join(cfg.Runner.DataDir, "images"))
	if err != nil {
		return err
	}
	cfg.Runner.Log = log
	cfg.Runner.Machines = &daemon.Machines{Driver: fakevmm.New(fakevmm.Config{Fingerprint: cfg.VMM}), Network: fakenet.Network{}, Images: store, RunDir: cfg.RunDir}
	return daemon.RunRunner(ctx, cfg.Runner, func(r daemon.RunnerReady) error { return out.Encode(r) })
}

// imageStore makes a store with an image, once.
func imageStore(ctx context.Context, dir string) (*images.Store, error) {
	if err := os.Mkdir(dir, 0o700); errors.Is(err, os.ErrExist) {
		return images.Open(dir)
	}
	store, _, err := testvm.NewFakeImage(ctx, dir)
	return store, err
}

// process is a server.
type process struct {
	cmd    *exec.Cmd
	log    string // file
	ended  chan struct{}
	status int
}

// begin starts a server whose first line of output is decoded into ready; nil waits for nothing.
func begin(t *testing.T, role string, cfg serverConfig, ready any) *process {
	t.Helper()
	b, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(t.TempDir(), role+".log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	p := &process{cmd: exec.Command(exe), log: log.Name(), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), roleVariable+"="+role, configVariable+"="+string(b))
	p.cmd.Stdout, p.cmd.Stderr = in, log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = in.Close()
	go func() {
		_ = p.cmd.Wait() // the status says it
		p.status = p.cmd.ProcessState.ExitCode()
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // it may have ended
		<-p.ended
		if t.Failed() {
			t.Logf("log of the %s:\n%s", role, p.text(t))
		}
	})
	if ready == nil {
		return p
	}
	_ = out.SetReadDeadline(time.Now().Add(watchdog))
	if err := json.NewDecoder(out).Decode(ready); err != nil {
		t.Fatalf("the %s did not become ready: %v\n%s", role, err, p.text(t))
	}
	return p
}

func (p *process) text(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(p.log)
	if err != nil {
		t.Fatal(err)
	}
	return string(b[max(0, len(b)-8<<10):])
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.ended
}

// stop ends a server as systemd does and returns its exit status.
func (p *process) stop(t *testing.T) int {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	return p.wait(t)
}

func (p *process) wait(t *testing.T) int {
	t.Helper()
	select {
	case <-p.ended:
	case <-time.After(watchdog):
		t.Fatalf("the process has not ended:\n%s", p.text(t))
	}
	return p.status
}

// cluster is a database with controllers and runners.
type cluster struct {
	t      *testing.T
	dir    string
	cfg    daemon.ControllerConfig
	ready  daemon.ControllerReady
	client *coppice.Client
	points string // failpoints of the next start
	*process
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	return newClusterOf(t, func(*daemon.ControllerConfig) {})
}

func newClusterOf(t *testing.T, change func(*daemon.ControllerConfig)) *cluster {
	t.Helper()
	dir := t.TempDir()
	c := &cluster{t: t, dir: dir, cfg: daemon.ControllerConfig{
		Database: testpg.New(t, migrations.Up), Listen: testaddr.New(), RunnerListen: testaddr.New(),
		KeyFile: filepath.Join(dir, "cluster.key"), APIKeyFile: filepath.Join(dir, "api.key"), Metrics: "127.0.0.1:0", AllowWeak: durability.Settings(),
	}}
	change(&c.cfg)
	c.start()
	return c
}

// start runs the controller, at the addresses that it had before.
func (c *cluster) start() {
	c.t.Helper()
	c.process = begin(c.t, "controller", serverConfig{Controller: c.cfg, Failpoints: c.points}, &c.ready)
	c.cfg.Listen, c.cfg.RunnerListen = c.ready.Server[len("http://"):], c.ready.Runners[len("https://"):]
	c.client = c.connect(c.ready.Server)
}

func (c *cluster) connect(server string) *coppice.Client {
	c.t.Helper()
	key, err := os.ReadFile(c.cfg.APIKeyFile)
	if err != nil {
		c.t.Fatal(err)
	}
	transport := &http.Transport{MaxIdleConnsPerHost: 64}
	c.t.Cleanup(transport.CloseIdleConnections)
	client, err := coppice.New(coppice.Config{Server: server, Token: string(key[:len(key)-1]), Transport: apitest.Transport(c.t, transport)})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(client.Close)
	return client
}

// member is a runner's process with what it needs to be started again.
type member struct {
	*process
	cfg   serverConfig
	ready daemon.RunnerReady
}

func (c *cluster) token(id coppice.RunnerID) string {
	c.t.Helper()
	token, err := c.client.CreateRunnerToken(c.t.Context(), coppice.CreateRunnerTokenRequest{RunnerID: id})
	if err != nil {
		c.t.Fatal(err)
	}
	return token.Token
}

// join starts a new runner.
func (c *cluster) join(change func(*daemon.RunnerConfig)) *member {
	c.t.Helper()
	m := &member{cfg: c.runnerConfig()}
	m.cfg.Runner.JoinToken = c.token("")
	if change != nil {
		change(&m.cfg.Runner)
	}
	m.process = begin(c.t, "runner", m.cfg, &m.ready)
	return m
}

func (c *cluster) runnerConfig() serverConfig {
	c.t.Helper()
	runDir, err := os.MkdirTemp("", "run")
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = os.RemoveAll(runDir) })
	return serverConfig{RunDir: runDir, Runner: daemon.RunnerConfig{
		HostConfig:  daemon.HostConfig{DataDir: c.t.TempDir(), MaxSandboxes: 16},
		Controllers: []string{c.ready.Runners}, Listen: testaddr.New(),
	}}
}

// until polls for something that happens in another process.
func until(t *testing.T, what string, ok func() (bool, error)) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for began := time.Now(); ; <-tick.C {
		done, err := ok()
		if done {
			return
		}
		if time.Since(began) > watchdog {
			t.Fatalf("%s: not after %s: %v", what, time.Since(began).Round(time.Second), err)
		}
	}
}
