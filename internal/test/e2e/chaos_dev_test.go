package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// devDeployment is `coppice dev`: everything in one process.
type devDeployment struct {
	t *testing.T
	x *chaos
	s *stack
}

func deployDev(t *testing.T, x *chaos) *deployment {
	t.Helper()
	s := newStack(t, "--listen", freeAddress(t), "--max-sandboxes", "32", "--warm", "1")
	client, err := coppice.New(coppice.Config{Server: s.server, Token: s.token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	d := &devDeployment{t, x, s}
	return &deployment{
		clients: []*coppice.Client{client}, hosts: []*stack{s}, alive: d.alive, finale: d.crash,
		nemeses: [][]mischief{{
			{"kill the server", 3, d.killServer},
			{"kill the database", 2, d.killDatabase},
			{"stop the server for a while", 2, d.stopServer},
			{"stop the server for longer than its leases", 1, d.stopServerLong},
			{"kill a machine", 2, x.killMachine},
			{"stop a machine for a while", 2, x.stopMachine},
		}},
	}
}

func (d *devDeployment) alive() error {
	select {
	case <-d.s.ended:
		return fmt.Errorf("coppice dev: %v", d.s.state)
	default:
		return nil
	}
}

func (d *devDeployment) killServer(_ context.Context, rng *rand.Rand) string {
	d.s.kill(d.t)
	hold(between(rng, 0, 2*time.Second))
	d.s.start(d.t)
	return ""
}

// crash kills the server and its database.
func (d *devDeployment) crash(rng *rand.Rand) string {
	return "database " + d.killDatabase(d.t.Context(), rng) + ", server " + d.killServer(d.t.Context(), rng)
}

func (d *devDeployment) killDatabase(context.Context, *rand.Rand) string {
	pid, err := postmaster(filepath.Join(d.s.data, "postgres"))
	if err != nil {
		return "not there: " + err.Error()
	}
	return said(syscall.Kill(pid, syscall.SIGKILL))
}

// postmaster is PostgreSQL's first process.
func postmaster(dir string) (int, error) {
	b, err := os.ReadFile(filepath.Join(dir, "data/postmaster.pid"))
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return strconv.Atoi(line)
}

func (d *devDeployment) stopServer(_ context.Context, rng *rand.Rand) string {
	return d.stopFor(between(rng, time.Second, 4*time.Second))
}

// stopServerLong lets the leases of operations end, and those of the runner's machines, which only this process can renew.
func (d *devDeployment) stopServerLong(_ context.Context, rng *rand.Rand) string {
	return d.stopFor(between(rng, 9*time.Second, 20*time.Second))
}

func (d *devDeployment) stopFor(t time.Duration) string {
	pid := d.s.cmd.Process.Pid
	err := syscall.Kill(pid, syscall.SIGSTOP)
	hold(t)
	return said(err, syscall.Kill(pid, syscall.SIGCONT))
}

func (x *chaos) killMachine(_ context.Context, rng *rand.Rand) string {
	w, m, err := x.victim(rng)
	if err != nil {
		return "none: " + err.Error()
	}
	x.doom(w.ID)
	return w.Name + " " + said(syscall.Kill(m.pid, syscall.SIGKILL))
}

func (x *chaos) stopMachine(_ context.Context, rng *rand.Rand) string {
	w, m, err := x.victim(rng)
	if err != nil {
		return "none: " + err.Error()
	}
	err = syscall.Kill(m.pid, syscall.SIGSTOP)
	hold(between(rng, time.Second, 3*time.Second))
	return w.Name + " " + said(err, syscall.Kill(m.pid, syscall.SIGCONT))
}
