package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/pgcluster"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const (
	splitControllers = 2
	splitRunners     = 2

	// The leases of a split deployment. The hard one is far shorter than by default, so that a run sees its end; nothing but the fault
	// that is meant to may keep a runner silent for so long.
	splitSoft  = 8 * time.Second
	splitFence = 30 * time.Second
)

// splitDeployment is what platform teams have: several controllers and runners, each a process of its own, over one database.
type splitDeployment struct {
	t   *testing.T
	x   *chaos
	dir string

	pgConfig    pgcluster.Config
	pg          *pgcluster.Cluster // changed by the nemesis of servers only
	controllers []*process
	runners     []*splitRunner

	mu    sync.Mutex // guards what follows
	lambs int
	lamb  coppice.WorkspaceID // whose agent is killed
}

type splitRunner struct {
	*process
	id    coppice.RunnerID
	host  *stack
	links []*relay // to and from the controllers
}

func deploySplit(t *testing.T, x *chaos) *deployment {
	t.Helper()
	needVM(t)
	baseImage(t)
	bins, err := pgcluster.Find(t.Context(), os.Getenv("PGBIN"))
	if err != nil {
		t.Fatal(err)
	}
	d := &splitDeployment{t: t, x: x, dir: t.TempDir()}
	d.pgConfig = pgcluster.Config{Dir: filepath.Join(d.dir, "postgres"), Binaries: bins, Durable: true, Log: slog.New(slog.DiscardHandler)}
	if d.pg, err = pgcluster.Start(t.Context(), d.pgConfig); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.pg.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	clients := make([]*coppice.Client, splitControllers)
	inner := make([]string, splitControllers)
	var secret, cluster string
	for i := range clients {
		public := freeAddress(t)
		inner[i] = freeAddress(t)
		c := newProcess(t, fmt.Sprintf("controller-%d", i), d.dir, "--json", "controller", "--database", d.pg.DSN("postgres"), "--key-file", filepath.Join(d.dir, "cluster.key"),
			"--api-key-file", filepath.Join(d.dir, "api.key"), "--listen", public, "--runner-listen", inner[i],
			"--runner-lease", splitSoft.String(), "--runner-fence", splitFence.String(), "--log-level", "debug")
		var ready struct {
			ClusterID string `json:"cluster_id"`
		}
		c.mustStart(&ready)
		d.controllers, cluster = append(d.controllers, c), ready.ClusterID
		b, err := os.ReadFile(filepath.Join(d.dir, "api.key"))
		if err != nil {
			t.Fatal(err)
		}
		secret = strings.TrimSpace(string(b))
		if clients[i], err = coppice.New(coppice.Config{Server: "http://" + public, Token: secret}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(clients[i].Close)
	}
	hosts := make([]*stack, splitRunners)
	for i := range hosts {
		r := d.join(i, cluster, clients[0], inner)
		r.host.client, r.host.server, r.host.token = clients[0], "", secret
		hosts[i] = r.host
	}
	return &deployment{
		clients: clients, hosts: hosts, alive: d.alive, finale: d.crash,
		nemeses: [][]mischief{
			{
				{"kill a controller", 4, d.killController},
				{"stop a controller for a while", 2, d.stopController},
				{"stop a controller for longer than its operations' leases", 2, d.stopControllerLong},
				{"kill a runner", 4, d.killRunner},
				{"stop a runner for a while", 2, d.stopRunner},
				{"kill the database", 2, d.killDatabase},
				{"stop the database for a while", 2, d.stopDatabase},
			},
			{
				{"kill a machine", 3, x.killMachine},
				{"stop a machine for a while", 2, x.stopMachine},
				{"kill a guest agent", 2, d.killAgent},
				{"cut a runner off for a while", 3, d.cutOff},
				{"cut a runner off for longer than its soft lease", 2, d.cutOffLong},
				{"cut one way between a runner and the controllers", 3, d.cutOneWay},
				{"break all connections of a runner", 3, d.breakLinks},
				{"silence a runner for longer than its hard lease", 3, d.silenceRunner},
			},
		},
	}
}

// join starts a runner that reaches the controllers, and is reached, through relays.
func (d *splitDeployment) join(i int, cluster string, client *coppice.Client, controllers []string) *splitRunner {
	d.t.Helper()
	name := fmt.Sprintf("runner-%d", i)
	ticket, err := client.CreateRunnerToken(d.t.Context(), coppice.CreateRunnerTokenRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	token := filepath.Join(d.dir, name+".token")
	if err := os.WriteFile(token, []byte(ticket.Token+"\n"), 0o600); err != nil {
		d.t.Fatal(err)
	}
	dir := filepath.Join(d.dir, name)
	listen := freeAddress(d.t)
	r := &splitRunner{host: &stack{dir: dir, data: filepath.Join(dir, "data")}}
	in := newRelay(d.t, listen)
	r.links = append(r.links, in)
	args := []string{
		"--json", "runner", "--data-dir", r.host.data, "--images-dir", imageStore(d.t).Dir(), "--join-token-file", token, "--listen", listen, "--endpoint", "https://" + in.address(),
		"--disk-budget", "4G", "--warm", "1", "--max-sandboxes", "24", "--accel", "tcg", "--stop-vms", "--log-level", "debug", "--allow-weak-host", weakHost,
	}
	for _, c := range controllers {
		out := newRelay(d.t, c)
		r.links = append(r.links, out)
		args = append(args, "--controller", "https://"+out.address())
	}
	if err := os.MkdirAll(r.host.data, 0o711); err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { // after the runner has ended
		for _, fault := range r.host.remains() {
			d.t.Error(fault)
		}
	})
	r.process = newProcess(d.t, name, d.dir, args...)
	var member struct {
		RunnerID string `json:"runner_id"`
	}
	r.mustStart(&member)
	r.id = member.RunnerID
	if err := os.WriteFile(filepath.Join(r.host.data, "cluster-id"), []byte(cluster+"/"+r.id), 0o600); err != nil {
		d.t.Fatal(err)
	}
	if err := r.host.learnNames(); err != nil {
		d.t.Fatal(err)
	}
	d.runners = append(d.runners, r)
	return r
}

func (d *splitDeployment) alive() error {
	var errs []error
	for _, c := range d.controllers {
		errs = append(errs, c.alive())
	}
	for _, r := range d.runners {
		errs = append(errs, r.alive())
	}
	return errors.Join(errs...)
}

func (d *splitDeployment) someController(rng *rand.Rand) *process {
	return d.controllers[rng.IntN(len(d.controllers))]
}

func (d *splitDeployment) someRunner(rng *rand.Rand) *splitRunner {
	return d.runners[rng.IntN(len(d.runners))]
}

func (d *splitDeployment) killController(_ context.Context, rng *rand.Rand) string {
	c := d.someController(rng)
	return c.name + " " + said(c.restart(between(rng, 0, 4*time.Second)))
}

func (d *splitDeployment) stopController(_ context.Context, rng *rand.Rand) string {
	c := d.someController(rng)
	return c.name + " " + said(c.pause(between(rng, time.Second, 4*time.Second)))
}

// stopControllerLong lets another controller take what this one was at: when it goes on, nothing of that is its own any more.
func (d *splitDeployment) stopControllerLong(_ context.Context, rng *rand.Rand) string {
	c := d.someController(rng)
	return c.name + " " + said(c.pause(between(rng, 10*time.Second, 13*time.Second)))
}

func (d *splitDeployment) killRunner(_ context.Context, rng *rand.Rand) string {
	r := d.someRunner(rng)
	return r.name + " " + said(r.restart(between(rng, 0, 4*time.Second)))
}

func (d *splitDeployment) stopRunner(_ context.Context, rng *rand.Rand) string {
	r := d.someRunner(rng)
	return r.name + " " + said(r.pause(between(rng, time.Second, 11*time.Second)))
}

// crash is the end of all servers at once, as of a host that loses its power but for the virtual machines. They are started again in any
// order.
func (d *splitDeployment) crash(rng *rand.Rand) string {
	all := []*process{}
	for _, r := range d.runners {
		all = append(all, r.process)
	}
	all = append(all, d.controllers...)
	rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	var group sync.WaitGroup
	out := make([]string, len(all)+1)
	group.Go(func() { out[0] = "database " + d.killDatabase(d.t.Context(), rng) })
	for i, p := range all {
		group.Go(func() { out[i+1] = p.name + " " + said(p.restart(0)) })
	}
	group.Wait()
	return strings.Join(out, ", ")
}

func (d *splitDeployment) killDatabase(_ context.Context, rng *rand.Rand) string {
	if err := syscall.Kill(d.pg.PID(), syscall.SIGKILL); err != nil {
		return err.Error()
	}
	<-d.pg.Done()
	hold(between(rng, 0, 2*time.Second))
	pg, err := pgcluster.Start(d.t.Context(), d.pgConfig)
	if err != nil {
		d.t.Errorf("PostgreSQL was not started again: %v", err)
		return err.Error()
	}
	d.pg = pg
	return "done"
}

// stopDatabase stops PostgreSQL and all its backends.
func (d *splitDeployment) stopDatabase(_ context.Context, rng *rand.Rand) string {
	pids := []int{d.pg.PID()}
	errs := []error{syscall.Kill(d.pg.PID(), syscall.SIGSTOP)} // no more backends from here on
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", d.pg.PID(), d.pg.PID()))
	errs = append(errs, err)
	for field := range strings.FieldsSeq(string(children)) {
		if pid, err := strconv.Atoi(field); err == nil && syscall.Kill(pid, syscall.SIGSTOP) == nil {
			pids = append(pids, pid)
		}
	}
	hold(between(rng, time.Second, 4*time.Second))
	for _, pid := range pids {
		errs = append(errs, syscall.Kill(pid, syscall.SIGCONT))
	}
	return said(errs...)
}

const lambName = "lamb"

// killAgent makes the kernel of a guest kill everything but the first process, which starts another agent. Exec works again then, and
// the machine is the same one.
func (d *splitDeployment) killAgent(ctx context.Context, rng *rand.Rand) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	w, err := d.sheep(ctx, rng)
	if err != nil {
		return "none: " + err.Error()
	}
	before, err := d.ask(ctx, rng, w, "cat /etc/machine-id")
	if err != nil {
		return "not reached: " + err.Error()
	}
	_, err = d.ask(ctx, rng, w, "trap '' TERM; echo i >/proc/sysrq-trigger")
	for begun := time.Now(); time.Since(begun) < time.Minute && ctx.Err() == nil; hold(100 * time.Millisecond) {
		after, err := d.ask(ctx, rng, w, "cat /etc/machine-id")
		if err == nil {
			if after != before {
				d.t.Errorf("after its agent was killed, %s has machine id %q, and had %q", lambName, after, before)
			}
			return fmt.Sprintf("%s answers again after %.1f s", w, time.Since(begun).Seconds())
		}
	}
	return fmt.Sprintf("%s, %v", w, err)
}

func (d *splitDeployment) ask(ctx context.Context, rng *rand.Rand, w coppice.WorkspaceID, script string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	res, err := d.x.any(rng).Exec(ctx, w, coppice.ExecRequest{Command: []string{"/bin/sh", "-c", script}})
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("exit status %d", res.ExitCode)
	}
	return res.Stdout, err
}

// sheep returns a workspace that no search has.
func (d *splitDeployment) sheep(ctx context.Context, rng *rand.Rand) (coppice.WorkspaceID, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if d.lamb != "" {
		w, err := d.x.any(rng).Workspace(ctx, d.lamb)
		if err != nil || w.State == coppice.WorkspaceReady {
			return d.lamb, err
		}
	}
	seeds := d.x.trees[rng.IntN(len(d.x.trees))]
	d.lambs++
	res, err := d.x.any(rng).ForkCheckpoint(ctx, seeds.root, coppice.ForkCheckpointRequest{BranchName: fmt.Sprintf("%s-%d", lambName, d.lambs)})
	if err != nil {
		return "", err
	}
	if p := res.Children[0].Problem; p != nil {
		return "", p.Err()
	}
	d.lamb = res.Children[0].Workspace.ID
	return d.lamb, nil
}

func (r *splitRunner) silence(links []*relay, d time.Duration) string {
	for _, l := range links {
		l.set(relaySilent)
	}
	hold(d)
	for _, l := range links {
		l.set(relayOpen)
	}
	return fmt.Sprintf("%s for %.1f s", r.name, d.Seconds())
}

func (d *splitDeployment) cutOff(_ context.Context, rng *rand.Rand) string {
	r := d.someRunner(rng)
	return r.silence(r.links, between(rng, time.Second, 5*time.Second))
}

func (d *splitDeployment) cutOffLong(_ context.Context, rng *rand.Rand) string {
	r := d.someRunner(rng)
	return r.silence(r.links, between(rng, splitSoft+time.Second, splitSoft+5*time.Second))
}

// cutOneWay lets heartbeats through and no calls, or the other way round.
func (d *splitDeployment) cutOneWay(_ context.Context, rng *rand.Rand) string {
	r := d.someRunner(rng)
	if rng.IntN(2) == 0 {
		return "calls to " + r.silence(r.links[:1], between(rng, time.Second, 10*time.Second))
	}
	return "heartbeats of " + r.silence(r.links[1:], between(rng, time.Second, 10*time.Second))
}

func (d *splitDeployment) breakLinks(_ context.Context, rng *rand.Rand) string {
	r := d.someRunner(rng)
	for _, l := range r.links {
		l.set(relayRefusing)
	}
	hold(between(rng, 0, 2*time.Second))
	for _, l := range r.links {
		l.set(relayOpen)
	}
	return r.name
}

// silenceRunner cuts a runner off until its machines have ended and the controllers have given it up. Its checkpoints stay.
func (d *splitDeployment) silenceRunner(ctx context.Context, rng *rand.Rand) string {
	long := splitSoft + splitFence + 4*time.Second
	if left, ok := ctx.Deadline(); !ok || time.Until(left) < long {
		return "not begun: there is no time"
	}
	r := d.someRunner(rng)
	d.x.mu.Lock()
	at := len(d.x.silences)
	d.x.silences = append(d.x.silences, silence{runner: r.id, from: time.Now()})
	d.x.mu.Unlock()
	out := r.silence(r.links, long)
	d.x.mu.Lock()
	d.x.silences[at].to = time.Now()
	d.x.mu.Unlock()
	return out
}

// process is a server that is killed and started again.
type process struct {
	t    *testing.T
	name string
	args []string
	log  string

	mu    sync.Mutex // held while something is done to the process
	cmd   *exec.Cmd
	ended chan struct{}
	state *os.ProcessState
}

// newProcess makes a server that ends with the test, with status 0.
func newProcess(t *testing.T, name, dir string, args ...string) *process {
	t.Helper()
	t.Helper()
	s := &process{t: t, name: name, args: args, log: filepath.Join(dir, name+".log")}
	t.Cleanup(func() {
		if s.cmd == nil {
			return
		}
		if err := s.stop(); err != nil {
			t.Error(err)
		}
		b, err := os.ReadFile(s.log)
		if err != nil {
			t.Error(err)
		}
		if at := strings.Index(string(b), "\npanic: "); at >= 0 {
			t.Errorf("%s panicked:\n%s", name, b[at:min(len(b), at+8<<10)])
		}
		if keep := os.Getenv("COPPICE_E2E_LOG"); keep != "" {
			_ = os.WriteFile(keep+"."+name, b, 0o600)
		} else if t.Failed() {
			t.Logf("%s's log ends with:\n%s", name, b[max(0, len(b)-16<<10):])
		}
	})
	return s
}

// launch starts the process and returns what it says when it is ready.
func (s *process) launch() (io.ReadCloser, error) {
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	out, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	s.cmd = exec.Command(program(s.t, "cmd/coppice"), s.args...)
	s.cmd.Stdout, s.cmd.Stderr = in, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := startBound(s.cmd); err != nil {
		return nil, errors.Join(err, out.Close())
	}
	s.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) {
		_ = cmd.Wait() // the state says it
		s.state = cmd.ProcessState
		close(ended)
	}(s.cmd, s.ended)
	return out, nil
}

// mustStart starts the process for the first time.
func (s *process) mustStart(ready any) {
	s.t.Helper()
	out, err := s.launch()
	if err != nil {
		s.t.Fatal(err)
	}
	defer out.Close()
	if err := json.NewDecoder(out).Decode(ready); err != nil {
		<-s.ended
		s.t.Fatalf("%s did not become ready: %v; %v", s.name, err, s.state)
	}
}

// restart kills the process and starts another after a while. That may not become ready before other faults have healed.
func (s *process) restart(after time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.alive(); err != nil {
		s.t.Error(err)
	}
	if err := s.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-s.ended
	hold(after)
	out, err := s.launch()
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, out)
		_ = out.Close()
	}()
	return nil
}

func (s *process) pause(d time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.cmd.Process.Signal(syscall.SIGSTOP)
	hold(d)
	return errors.Join(err, s.cmd.Process.Signal(syscall.SIGCONT))
}

// alive says how a process ended that nobody killed.
func (s *process) alive() error {
	select {
	case <-s.ended:
		return fmt.Errorf("%s: %v", s.name, s.state)
	default:
		return nil
	}
}

func (s *process) stop() error {
	if err := s.alive(); err != nil {
		return fmt.Errorf("it had ended before it was told to: %w", err)
	}
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-s.ended:
	case <-time.After(stopPatience):
		_ = s.cmd.Process.Kill()
		<-s.ended
		return fmt.Errorf("%s did not stop within %s", s.name, stopPatience)
	}
	if code := s.state.ExitCode(); code != 0 {
		return fmt.Errorf("%s ended with %v", s.name, s.state)
	}
	return nil
}

// relay carries connections to an address, or does not.
type relay struct {
	listener net.Listener
	to       string
	wg       sync.WaitGroup

	mu      sync.Mutex // guards what follows
	changed *sync.Cond
	mode    relayMode
	conns   map[net.Conn]bool
}

type relayMode int

const (
	relayOpen     relayMode = iota
	relaySilent             // nothing gets through, as if packets were dropped
	relayRefusing           // connections are broken and refused
	relayClosed
)

func newRelay(t *testing.T, to string) *relay {
	t.Helper()
	return newRelayAt(t, "127.0.0.1:0", to)
}

func newRelayAt(t *testing.T, listen, to string) *relay {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp4", listen)
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{listener: l, to: to, conns: map[net.Conn]bool{}}
	r.changed = sync.NewCond(&r.mu)
	r.wg.Go(r.accept)
	t.Cleanup(func() {
		_ = l.Close()
		r.set(relayClosed)
		r.wg.Wait()
	})
	return r
}

func (r *relay) address() string { return r.listener.Addr().String() }

func (r *relay) set(m relayMode) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mode = m
	if m == relayRefusing || m == relayClosed {
		for c := range r.conns {
			_ = c.Close()
		}
	}
	r.changed.Broadcast()
}

// pass waits until something may get through, and reports whether it does.
func (r *relay) pass() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.mode == relaySilent {
		r.changed.Wait()
	}
	return r.mode == relayOpen
}

// keep remembers a connection, unless there must be none.
func (r *relay) keep(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mode == relayRefusing || r.mode == relayClosed {
		return false
	}
	r.conns[c] = true
	return true
}

func (r *relay) accept() {
	for {
		near, err := r.listener.Accept()
		if err != nil {
			return
		}
		r.wg.Go(func() { r.carry(near) })
	}
}

func (r *relay) carry(near net.Conn) {
	defer near.Close()
	if !r.keep(near) {
		return
	}
	defer r.drop(near)
	if !r.pass() {
		return
	}
	far, err := net.Dial("tcp", r.to)
	if err != nil {
		return
	}
	defer far.Close()
	if !r.keep(far) {
		return
	}
	defer r.drop(far)
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{near, far}, {far, near}} {
		both.Go(func() { r.pump(way[0], way[1]) })
	}
	both.Wait()
}

func (r *relay) drop(c net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, c)
}

// pump carries one direction to its end, which is the end of both.
func (r *relay) pump(from, to net.Conn) {
	defer from.Close()
	defer to.Close()
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		if n > 0 {
			if !r.pass() {
				return
			}
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			_ = r.pass() // that it has ended does not get through either
			return
		}
	}
}
