package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// server is a running `coppice dev`.
type server struct {
	cmd     *exec.Cmd
	ended   chan struct{} // closed when the process has ended
	log     string
	client  *coppice.Client
	cluster string // in the names of its VMMs
	image   string
	data    string

	mu   sync.Mutex // guards live
	live map[coppice.WorkspaceID]int
}

// The server's settings. The number of warm shells is the default, which users get.
const (
	warmShells   = 4
	maxSandboxes = 96
)

// startServer starts `coppice dev`, with further flags, and waits until it reports that it is ready. It ends with this process.
func startServer(ctx context.Context, cfg config, dir string, flags ...string) (_ *server, err error) {
	s := &server{
		ended: make(chan struct{}), log: filepath.Join(cfg.out, "coppice-"+filepath.Base(dir)+".log"), image: cfg.image,
		live: make(map[coppice.WorkspaceID]int),
	}
	log, err := os.Create(s.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	out, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer out.Close()
	s.data = filepath.Join(dir, "data")
	if err := os.MkdirAll(dir, 0o711); err != nil { //nolint:gosec // G301: the database's user must pass
		return nil, err
	}
	s.cmd = exec.Command(cfg.coppice, "--json", "dev", "--data-dir", s.data, "--images-dir", cfg.images, "--listen", "127.0.0.1:0", "--on-exit", "stop", //nolint:gosec,noctx // G204: our own program, which stop ends
		"--max-sandboxes", fmt.Sprint(maxSandboxes), "--warm", fmt.Sprint(warmShells), "--log-level", "warn", "--vmm", cfg.vmm, "--accel", cfg.accel)
	s.cmd.Args = append(s.cmd.Args, flags...)
	s.cmd.Env = append(os.Environ(), "COPPICE_CONNECTION="+filepath.Join(dir, "connection.json"), "COPPICE_QEMU="+cfg.qemu, "COPPICE_CLOUD_HYPERVISOR="+cfg.ch)
	s.cmd.Stdout, s.cmd.Stderr = in, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	err = s.start()
	_ = in.Close() // the server has its own copy
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.stop())
		}
	}()
	defer context.AfterFunc(ctx, func() { _ = out.Close() })() // ends the waiting
	var ready struct{ Server, Key string }
	if err := json.NewDecoder(out).Decode(&ready); err != nil {
		return nil, fmt.Errorf("coppice dev did not become ready (%w); see %s", err, s.log)
	}
	id, err := os.ReadFile(filepath.Join(s.data, "cluster-id"))
	if err != nil {
		return nil, err
	}
	s.cluster = core.DigestOf([]byte(strings.TrimSpace(string(id)))).Hex()[:8]
	s.client, err = coppice.New(coppice.Config{Server: ready.Server, Token: ready.Key})
	return s, err
}

// start starts the process from a thread that lives as long as the process: when the thread that started a child ends,
// the kernel signals the child.
func (s *server) start() error {
	started := make(chan error)
	osthread.Go(func() {
		if err := s.cmd.Start(); err != nil {
			started <- err
			return
		}
		started <- nil
		_ = s.cmd.Wait() // its state says it
		close(s.ended)
	})
	return <-started
}

// stop ends the server as Ctrl-C does.
func (s *server) stop() error {
	select {
	case <-s.ended:
		return fmt.Errorf("coppice dev ended by itself: %v; see %s", s.cmd.ProcessState, s.log)
	default:
	}
	if s.client != nil {
		s.client.Close()
	}
	if err := s.cmd.Process.Signal(os.Interrupt); err != nil {
		return err
	}
	timer := time.NewTimer(stopTime)
	defer timer.Stop()
	select {
	case <-s.ended:
	case <-timer.C:
		err := errors.Join(errors.New("coppice dev did not stop in time and was killed"), s.cmd.Process.Kill())
		<-s.ended
		return err
	}
	if !s.cmd.ProcessState.Success() {
		return fmt.Errorf("coppice dev ended with %v; see %s", s.cmd.ProcessState, s.log)
	}
	return nil
}

// create makes a workspace of the image.
func (s *server) create(ctx context.Context, memoryMiB int) (coppice.WorkspaceID, float64, error) {
	began := time.Now()
	w, err := s.client.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{
		Image: s.image, Resources: coppice.ResourcesRequest{MemoryMiB: &memoryMiB},
	})
	took := report.Since(began)
	if err != nil {
		return "", 0, fmt.Errorf("create a workspace: %w", err)
	}
	s.alive(w.ID, memoryMiB)
	return w.ID, took, nil
}

func (s *server) alive(id coppice.WorkspaceID, memoryMiB int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live[id] = memoryMiB
}

// exec runs a command, which must succeed.
func (s *server) exec(ctx context.Context, id coppice.WorkspaceID, command ...string) (coppice.ExecResult, error) {
	out, err := s.client.Exec(ctx, id, coppice.ExecRequest{Command: command, Cwd: "/"})
	if err != nil {
		return out, fmt.Errorf("exec %s: %w", command[0], err)
	}
	if code := out.Session.ExitCode; code == nil || *code != 0 {
		return out, fmt.Errorf("exec %q ended with %v: %s", command, code, core.Clip(out.Stderr))
	}
	return out, nil
}

// checkpoint captures a workspace.
func (s *server) checkpoint(ctx context.Context, id coppice.WorkspaceID) (coppice.Checkpoint, error) {
	cp, err := s.client.CreateCheckpoint(ctx, id, coppice.CreateCheckpointRequest{})
	if err != nil {
		return cp, fmt.Errorf("checkpoint: %w", err)
	}
	return cp, nil
}

// fork makes children, all of which must become ready.
func (s *server) fork(ctx context.Context, id coppice.CheckpointID, n int) ([]coppice.ForkChild, error) {
	f, err := s.client.ForkCheckpoint(ctx, id, coppice.ForkCheckpointRequest{Count: &n, AllOrNothing: true})
	if err != nil {
		return nil, fmt.Errorf("fork %d: %w", n, err)
	}
	for _, c := range f.Children {
		if c.Workspace == nil {
			return nil, fmt.Errorf("fork %d: a child failed: %+v", n, c.Problem)
		}
		s.alive(c.Workspace.ID, c.Workspace.Resources.MemoryMiB)
	}
	return f.Children, nil
}

// forkOne is fork of one child.
func (s *server) forkOne(ctx context.Context, id coppice.CheckpointID) (coppice.ForkChild, error) {
	children, err := s.fork(ctx, id, 1)
	if err != nil {
		return coppice.ForkChild{}, err
	}
	return children[0], nil
}

// end terminates workspaces, a few at a time.
func (s *server) end(ctx context.Context, ids ...coppice.WorkspaceID) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for _, id := range ids {
		group.Go(func() error {
			if _, err := s.client.TerminateWorkspace(ctx, id); err != nil {
				return fmt.Errorf("terminate: %w", err)
			}
			s.mu.Lock()
			delete(s.live, id)
			s.mu.Unlock()
			return nil
		})
	}
	return group.Wait()
}

// endAll terminates all live workspaces.
func (s *server) endAll(ctx context.Context) error {
	s.mu.Lock()
	ids := make([]coppice.WorkspaceID, 0, len(s.live))
	for id := range s.live {
		ids = append(ids, id)
	}
	s.mu.Unlock()
	return s.end(ctx, ids...)
}

func idsOf(children []coppice.ForkChild) []coppice.WorkspaceID {
	out := make([]coppice.WorkspaceID, 0, len(children))
	for _, c := range children {
		out = append(out, c.Workspace.ID)
	}
	return out
}

// settle waits, for a few seconds at most, until the warm shells that the last fork used are replaced. For a user who
// thinks for a second, they are.
func (s *server) settle(ctx context.Context, memoryMiB int) error {
	s.mu.Lock()
	want := warmShells
	for _, m := range s.live {
		if m == memoryMiB {
			want++
		}
	}
	s.mu.Unlock()
	return awaitVMMs(ctx, s.cluster, memoryMiB, want)
}

// settleTime bounds the waiting for warm shells.
const settleTime = 5 * time.Second

func awaitVMMs(ctx context.Context, cluster string, memoryMiB, want int) error {
	limit, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	for {
		all, err := findVMMs(cluster)
		if err != nil {
			return err
		}
		n := 0
		for _, v := range all {
			if (v.memoryMiB == memoryMiB || v.memoryMiB == 0) && v.waits {
				n++
			}
		}
		if n >= want {
			return nil
		}
		if pace.Pause(limit, 20*time.Millisecond) != nil {
			return ctx.Err() // too few is no fault: the pool has other shapes to keep
		}
	}
}

// awaitBase waits for a while until a shell waits on a base of at least n MiB: the policy may not have wanted one.
func (s *server) awaitBase(ctx context.Context, memoryMiB, n int) error {
	limit, cancel := context.WithTimeout(ctx, rebaseTime)
	defer cancel()
	for {
		all, err := findVMMs(s.cluster)
		if err != nil {
			return err
		}
		for _, p := range all {
			if p.memoryMiB != memoryMiB {
				continue
			}
			if u, err := measureVMM(p); err == nil && !u.runs() && u.baseBytes >= int64(n)<<20 {
				return nil
			}
		}
		if pace.Pause(limit, 50*time.Millisecond) != nil {
			return ctx.Err()
		}
	}
}

// rebaseTime bounds the waiting for a rebase.
const rebaseTime = 20 * time.Second

// volumeMiB returns how much the runner's files take.
func (s *server) volumeMiB() (float64, error) {
	dir := filepath.Join(s.data, "volume", "runner") // where one was made
	if _, err := os.Stat(dir); err != nil {
		dir = s.data
	}
	return usedMiB(dir)
}
