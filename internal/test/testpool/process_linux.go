package testpool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"github.com/coppice-dev/coppice/internal/osthread"
)

// Process is a server of the program under test. It may be started again after its end.
type Process struct {
	Name string
	Log  string // file, appended to
	Args []string

	binary string
	netns  string   // path; empty: this one
	env    []string // besides this process's
	cmd    *exec.Cmd
	ended  chan struct{}
	ready  ready
}

// ready is what a server prints when it can be used.
type ready struct {
	Server, Runners, Volume string
	ClusterID               string `json:"cluster_id"`
	RunnerID                string `json:"runner_id"`
}

// stopTime bounds an end in order: a runner kills VMs.
const stopTime = 90 * time.Second

// Start runs the process until it says that it is ready. env is for this run alone. It ends with this process.
func (p *Process) Start(ctx context.Context, env ...string) error {
	log, err := os.OpenFile(p.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	out, in, err := os.Pipe()
	if err != nil {
		return err
	}
	defer out.Close()
	command := slices.Concat([]string{p.binary}, p.Args)
	if p.netns != "" {
		command = slices.Concat([]string{"nsenter", "--net=" + p.netns, "--"}, command)
	}
	cmd := exec.Command(command[0], command[1:]...) //nolint:gosec,noctx // G204: our own program, which Stop ends
	cmd.Env = slices.Concat(os.Environ(), p.env, env)
	cmd.Stdout, cmd.Stderr = in, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	started, ended := make(chan error, 1), make(chan struct{})
	osthread.Go(func() { // the kernel signals a child whose starter has ended
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // its state says it
			close(ended)
		}
	})
	err = <-started
	_ = in.Close() // the process has its own copy
	if err != nil {
		return err
	}
	p.cmd, p.ended = cmd, ended
	defer context.AfterFunc(ctx, func() { _ = out.Close() })() // ends the waiting
	if err := json.NewDecoder(out).Decode(&p.ready); err != nil {
		return fmt.Errorf("the %s did not become ready: %w; its log ends with:\n%s", p.Name, err, p.Tail())
	}
	return nil
}

// Lives reports whether it runs.
func (p *Process) Lives() bool {
	if p.cmd == nil {
		return false
	}
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// PID is the process's, of the last start.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Signal sends a signal.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Stop ends it in order, with SIGTERM, and wants status 0. One that does not end in time is killed, which is an error.
func (p *Process) Stop() error {
	if !p.Lives() {
		return nil
	}
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	timer := time.NewTimer(stopTime)
	defer timer.Stop()
	select {
	case <-p.ended:
	case <-timer.C:
		p.Kill()
		return fmt.Errorf("the %s did not end within %s", p.Name, stopTime)
	}
	if !p.cmd.ProcessState.Success() {
		return fmt.Errorf("the %s ended with %v; its log ends with:\n%s", p.Name, p.cmd.ProcessState, p.Tail())
	}
	return nil
}

// Kill ends it as a crash does.
func (p *Process) Kill() {
	if p.Lives() {
		_ = p.cmd.Process.Kill() // it may have ended
		<-p.ended
	}
}

// Tail is the end of its log.
func (p *Process) Tail() string {
	const shown = 24 << 10
	b, err := os.ReadFile(p.Log)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-shown):])
}
