package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testpool"
	"github.com/coppice-dev/coppice/internal/test/tests3"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// pool is an installation with several runners, each on a host of its own.
type pool struct {
	*testpool.Pool
	t     *testing.T
	store *tests3.Server
	image core.Digest
	hosts []*poolHost
}

// poolHost is one host. Its stack's client is the pool's.
type poolHost struct {
	*testpool.Host
	*stack // what the runner has on the host
}

// parent makes a workspace with a witness of its first process, and runs a script in it.
func (p *pool) parent(s *stack, script string) (coppice.Workspace, sight) {
	p.t.Helper()
	ws, err := p.Client.CreateWorkspace(p.t.Context(), coppice.CreateWorkspaceRequest{Name: "parent", Image: string(p.image), Resources: small()})
	if err != nil {
		p.t.Fatal(err)
	}
	upload(p.t, s, ws.ID)
	was := startWitness(p.t, s, ws.ID)
	execute(p.t, s, ws.ID, "sh", "-c", script)
	return ws, was
}

// newPool starts a database, a store and a controller with short leases, with further arguments. They end with the test, and leave nothing.
func newPool(t *testing.T, controller ...string) *pool {
	t.Helper()
	needVM(t)
	require.That(t, "netns", exec.Command("nsenter", "--version").Run() == nil, "apt-get install util-linux")
	_, err := pgcluster.Find(t.Context(), os.Getenv("PGBIN"))
	require.That(t, "postgres", err == nil, "make setup")
	dir, err := os.MkdirTemp("", dirPrefix) //nolint:usetesting // the database's user must reach it, and t.TempDir is private
	if err != nil {
		t.Fatal(err)
	}
	p := &pool{t: t, store: tests3.Start(t), image: baseImage(t)}
	t.Cleanup(func() {
		p.stop()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	p.Pool, err = testpool.Open(t.Context(), testpool.Config{
		Dir: dir, Coppice: program(t, "cmd/coppice"), Images: imageStore(t).Dir(), PGBin: os.Getenv("PGBIN"), Store: p.store,
		Controller: append([]string{"--runner-lease", "6s", "--runner-fence", "6s", "--log-level", "debug"}, controller...),
		Runner:     []string{"--disk-budget", "1G", "--warm", "0", "--accel", "tcg", "--max-sandboxes", "8", "--log-level", "debug"},
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// join adds a host.
func (p *pool) join(more ...string) *poolHost {
	p.t.Helper()
	far, err := p.Join(p.t.Context(), more...)
	if err != nil {
		p.t.Fatal(err)
	}
	h := &poolHost{Host: far, stack: &stack{dir: far.Data, data: far.Data, client: p.Client}}
	p.hosts = append(p.hosts, h)
	if err := errors.Join(os.WriteFile(filepath.Join(h.data, "cluster-id"), []byte(far.Mark), 0o600), h.learnNames()); err != nil {
		p.t.Fatal(err)
	}
	return h
}

// stop ends the hosts with nothing left behind, and then what they had in common.
func (p *pool) stop() {
	p.t.Helper()
	for _, h := range p.hosts {
		if err := h.Leave(); err != nil {
			p.t.Error(err)
		}
		for _, fault := range h.remains() {
			p.t.Error(fault)
		}
		if p.t.Failed() {
			p.t.Logf("the %s logged:\n%s", h.Name, h.Tail())
		}
	}
	if p.Pool == nil {
		return
	}
	ctx, cancel := later(p.t)
	defer cancel()
	if err := p.Close(ctx); err != nil {
		p.t.Error(err)
	}
	if p.t.Failed() {
		p.t.Logf("the controller logged:\n%s", p.Controller.Tail())
	}
}

func (p *pool) sealed(t *testing.T, id coppice.CheckpointID) coppice.Checkpoint {
	t.Helper()
	cp, err := p.Client.WaitSealed(t.Context(), id)
	if err != nil || cp.State != coppice.CheckpointSealed {
		t.Fatalf("checkpoint %s is %s, %v", id, cp.State, err)
	}
	return cp
}

// memory reads the memory of a checkpoint as a host has it, once all of it is there.
func (h *poolHost) memory(t *testing.T, id coppice.CheckpointID) []byte {
	t.Helper()
	until(t, "all of the memory of "+id+" is on "+h.Name, func() (bool, error) { return h.whole(t, id), nil })
	b, err := h.Memory(id)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// whole reports whether all of the memory of a checkpoint is on the host.
func (h *poolHost) whole(t *testing.T, id coppice.CheckpointID) bool {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(h.Checkpoint(id), "checkpoint.json"))
	if err != nil {
		t.Fatal(err)
	}
	var rec struct{ Base string }
	if err := json.Unmarshal(b, &rec); err != nil || rec.Base == "" {
		t.Fatalf("the record of checkpoint %s names no base: %s, %v", id, b, err)
	}
	return exists(filepath.Join(h.Files(), "bases", rec.Base+".ram"))
}

// sameBytes compares a checkpoint on two hosts.
func sameBytes(t *testing.T, a, b *poolHost, id coppice.CheckpointID) {
	t.Helper()
	sameCheckpoints(t, a, id, b, id)
}

// sameCheckpoints compares two that must be the same.
func sameCheckpoints(t *testing.T, a *poolHost, id coppice.CheckpointID, b *poolHost, as coppice.CheckpointID) {
	t.Helper()
	if !bytes.Equal(a.memory(t, id), b.memory(t, as)) {
		t.Errorf("the memory of checkpoint %s differs between %s and %s", id, a.Name, b.Name)
	}
	for _, file := range []string{"overlay.ext4", "device.state"} {
		x, errX := os.ReadFile(filepath.Join(a.Checkpoint(id), file))
		y, errY := os.ReadFile(filepath.Join(b.Checkpoint(as), file))
		if err := errors.Join(errX, errY); err != nil || !bytes.Equal(x, y) {
			t.Errorf("%s of checkpoint %s differs between %s and %s, %v", file, id, a.Name, b.Name, err)
		}
	}
}

// TestPool: a tree of running machines that was grown on one host goes on on another, with the processes alive and every byte of
// memory and disk as it was, when the first host has died.
func TestPool(t *testing.T) {
	p := newPool(t)
	first := p.join()
	s := first.stack
	ws, was := p.parent(s, "echo on disk > /root/note; head -c 3000000 /dev/urandom > /root/data; sha256sum /root/data > /root/sum")
	root := checkpoint(t, s, ws.ID)
	step(t, s, ws.ID, "one")
	deeper := checkpoint(t, s, ws.ID)
	for _, id := range []coppice.CheckpointID{root.ID, deeper.ID} {
		cp := p.sealed(t, id)
		t.Logf("checkpoint %s: %d bytes of delta, %d stored", id, cp.DeltaBytes, cp.StoredBytes)
	}
	second := p.join()
	first.Kill()
	within(t, 2*time.Minute, "the workspace is lost with its host", func() (bool, error) {
		got, err := p.Client.Workspace(t.Context(), ws.ID)
		return err == nil && got.State == coppice.WorkspaceLost, err
	})
	began := time.Now()
	children := fork(t, second.stack, deeper.ID, coppiceFork{count: 2})
	t.Logf("two forks of what was nowhere on the host took %.1f s", time.Since(began).Seconds())
	sameBytes(t, first, second, deeper.ID)
	for i, c := range children {
		compare(t, "a child elsewhere", after(was, "one"), look(t, second.stack, c.Workspace.ID))
		compare(t, "a step on", after(was, "one", fmt.Sprint(i)), step(t, second.stack, c.Workspace.ID, fmt.Sprint(i)))
		if got := execute(t, second.stack, c.Workspace.ID, "sh", "-c", "cat /root/note; sha256sum -c /root/sum"); got != "on disk\n/root/data: OK\n" {
			t.Errorf("the child's disk has %q", got)
		}
	}
	// The tree grows on there.
	next := checkpoint(t, second.stack, children[0].Workspace.ID)
	p.sealed(t, next.ID)
	grown := forkOne(t, second.stack, next.ID)
	compare(t, "a grandchild", after(was, "one", "0"), look(t, second.stack, grown))
}
