package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/require"
	"github.com/coppice-dev/coppice/internal/tests3"
	"github.com/coppice-dev/coppice/runner/memory"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// pool is an installation with several runners, each a process in a network namespace of its own as on another host, one controller,
// one database and one store.
type pool struct {
	dir        string
	image      core.Digest
	binary     string
	database   *pgcluster.Cluster
	controller *server
	client     *coppice.Client
	runnerPort string // of the controller's listener for them
	store      func(near string) string
	joined     int
}

// poolHost is one host.
type poolHost struct {
	*server
	far   *farHost
	stack *stack // what the runner has on the host
}

// newPool starts a database and a controller. store gives the store's address as it is for who reaches this machine at near.
func newPool(t *testing.T, store func(near string) string) *pool {
	t.Helper()
	needVM(t)
	require.That(t, "netns", exec.Command("nsenter", "--version").Run() == nil, "apt-get install util-linux")
	dir, err := os.MkdirTemp("", dirPrefix) //nolint:usetesting // the database's user must reach it, and t.TempDir is private
	if err != nil {
		t.Fatal(err)
	}
	p := &pool{dir: dir, image: image(t, "e2e", guestAgent), binary: program(t, "cmd/coppice"), store: store}
	t.Cleanup(func() { p.stop(t) })
	binaries, err := pgcluster.Find(t.Context(), os.Getenv("PGBIN"))
	require.That(t, "postgres", err == nil, "make setup")
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if p.database, err = pgcluster.Start(t.Context(), pgcluster.Config{Dir: filepath.Join(dir, "pg"), Binaries: binaries, Log: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	p.runnerPort = port(freeAddress(t))
	p.controller = &server{name: "controller", binary: p.binary, log: filepath.Join(dir, "controller.log"), args: []string{
		"--json", "controller", "--database", p.database.DSN("postgres"), "--key-file", filepath.Join(dir, "cluster.key"), "--api-key-file", filepath.Join(dir, "api.key"),
		"--listen", freeAddress(t), "--runner-listen", net.JoinHostPort("0.0.0.0", p.runnerPort), "--runner-lease", "6s", "--runner-fence", "6s",
		"--store", store("127.0.0.1"), "--log-level", "debug",
	}}
	if err := p.controller.start(""); err != nil {
		t.Fatalf("%v\n%s", err, p.controller.tail())
	}
	key, err := os.ReadFile(filepath.Join(dir, "api.key"))
	if err != nil {
		t.Fatal(err)
	}
	if p.client, err = coppice.New(coppice.Config{Server: p.controller.ready.Server, Token: strings.TrimSpace(string(key))}); err != nil {
		t.Fatal(err)
	}
	return p
}

// join adds a host.
func (p *pool) join(t *testing.T) *poolHost {
	t.Helper()
	name := fmt.Sprintf("runner-%d", p.joined)
	p.joined++
	far := newFarHost(t)
	data := filepath.Join(p.dir, name)
	h := &poolHost{far: far, stack: &stack{dir: data, data: data, client: p.client}}
	ticket, err := p.client.CreateRunnerToken(t.Context(), coppice.CreateRunnerTokenRequest{})
	if err != nil {
		t.Fatal(err)
	}
	token := filepath.Join(p.dir, name+".token")
	if err := os.WriteFile(token, []byte(ticket.Token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.server = &server{name: name, binary: p.binary, netns: far.path, log: filepath.Join(p.dir, name+".log"), args: []string{
		"--json", "runner", "--data-dir", h.stack.data, "--images-dir", imageStore(t).Dir(), "--controller", "https://" + net.JoinHostPort(far.near, p.runnerPort),
		"--join-token-file", token, "--listen", far.far + ":7072", "--disk-budget", "1G", "--warm", "0", "--accel", "tcg", "--max-sandboxes", "8",
		"--store", p.store(far.near), "--log-level", "debug", "--stop-vms",
	}}
	t.Cleanup(func() { h.stop(t) }) // before its network goes
	if err := h.start(""); err != nil {
		t.Fatalf("%v\n%s", err, h.tail())
	}
	mark := p.controller.ready.ClusterID + "/" + h.ready.RunnerID
	if err := errors.Join(os.WriteFile(filepath.Join(h.stack.data, "cluster-id"), []byte(mark), 0o600), h.stack.learnNames()); err != nil {
		t.Fatal(err)
	}
	return h
}

// stop ends a host with nothing left behind. The successor of one that was killed takes down what that left.
func (h *poolHost) stop(t *testing.T) {
	t.Helper()
	if h.cmd == nil {
		return
	}
	if !h.lives() {
		if err := h.start(""); err != nil {
			t.Errorf("%v\n%s", err, h.tail())
		}
	}
	if err := h.end(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	for _, fault := range h.stack.remains() {
		t.Error(fault)
	}
	if t.Failed() {
		t.Logf("the %s logged:\n%s", h.name, h.tail())
	}
}

// stop ends what the hosts had in common.
func (p *pool) stop(t *testing.T) {
	t.Helper()
	if p.controller != nil && p.controller.cmd != nil {
		if err := p.controller.end(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("the controller logged:\n%s", p.controller.tail())
		}
	}
	if p.client != nil {
		p.client.Close()
	}
	if p.database != nil {
		ctx, cancel := later(t)
		defer cancel()
		if err := p.database.Remove(ctx); err != nil {
			t.Error(err)
		}
	}
	if err := os.RemoveAll(p.dir); err != nil {
		t.Error(err)
	}
}

func (p *pool) sealed(t *testing.T, id coppice.CheckpointID) coppice.Checkpoint {
	t.Helper()
	cp, err := p.client.WaitSealed(t.Context(), id)
	if err != nil || cp.State != coppice.CheckpointSealed {
		t.Fatalf("checkpoint %s is %s, %v", id, cp.State, err)
	}
	return cp
}

// files are the directory of a checkpoint on a host.
func (h *poolHost) files(id coppice.CheckpointID) string {
	return filepath.Join(h.stack.data, "volume", "runner", "checkpoints", id)
}

// memory reads the memory of a checkpoint as a host has it.
func (h *poolHost) memory(t *testing.T, id coppice.CheckpointID) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(h.files(id), "checkpoint.json"))
	if err != nil {
		t.Fatal(err)
	}
	var rec struct {
		Base       string `json:"base"`
		DeltaBytes int64  `json:"delta_bytes"`
	}
	if err := json.Unmarshal(b, &rec); err != nil {
		t.Fatal(err)
	}
	base, err := os.Open(filepath.Join(h.stack.data, "volume", "runner", "bases", rec.Base+".ram"))
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close()
	img := memory.Image{Base: base}
	if rec.DeltaBytes > 0 {
		if img.Delta, err = memory.OpenDelta(filepath.Join(h.files(id), "memory.delta")); err != nil {
			t.Fatal(err)
		}
		defer img.Delta.Close()
	}
	info, err := base.Stat()
	if err != nil {
		t.Fatal(err)
	}
	out := make([]byte, info.Size())
	if err := memory.NewReader(img).ReadAt(out, 0); err != nil {
		t.Fatal(err)
	}
	return out
}

// sameBytes compares a checkpoint on two hosts.
func sameBytes(t *testing.T, a, b *poolHost, id coppice.CheckpointID) {
	t.Helper()
	if !bytes.Equal(a.memory(t, id), b.memory(t, id)) {
		t.Errorf("the memory of checkpoint %s differs between %s and %s", id, a.name, b.name)
	}
	for _, file := range []string{"overlay.ext4", "device.state"} {
		x, errX := os.ReadFile(filepath.Join(a.files(id), file))
		y, errY := os.ReadFile(filepath.Join(b.files(id), file))
		if err := errors.Join(errX, errY); err != nil || !bytes.Equal(x, y) {
			t.Errorf("%s of checkpoint %s differs between %s and %s, %v", file, id, a.name, b.name, err)
		}
	}
}

// TestPool: a tree of running machines that was grown on one host goes on on another, with the processes alive and every byte of
// memory and disk as it was, when the first host has died.
func TestPool(t *testing.T) {
	s3 := tests3.Start(t)
	bucket := s3.Bucket(t)
	t.Setenv("COPPICE_STORE_ACCESS_KEY", s3.AccessKey)
	t.Setenv("COPPICE_STORE_SECRET_KEY", s3.SecretKey)
	p := newPool(t, func(near string) string {
		if near == "127.0.0.1" {
			return s3.URL(bucket)
		}
		relay := newRelayAt(t, near+":0", s3.Address)
		return fmt.Sprintf("s3://%s?endpoint=http://%s&region=%s&insecure=1", bucket, relay.address(), tests3.Region)
	})
	first := p.join(t)
	s := first.stack
	ws, err := p.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Name: "parent", Image: string(p.image), Resources: small()})
	if err != nil {
		t.Fatal(err)
	}
	upload(t, s, ws.ID)
	was := startWitness(t, s, ws.ID)
	execute(t, s, ws.ID, "sh", "-c", "echo on disk > /root/note; head -c 3000000 /dev/urandom > /root/data; sha256sum /root/data > /root/sum")
	root := checkpoint(t, s, ws.ID)
	step(t, s, ws.ID, "one")
	deeper := checkpoint(t, s, ws.ID)
	for _, id := range []coppice.CheckpointID{root.ID, deeper.ID} {
		cp := p.sealed(t, id)
		t.Logf("checkpoint %s: %d bytes of delta, %d stored", id, cp.DeltaBytes, cp.StoredBytes)
	}
	second := p.join(t)
	first.kill()
	within(t, 2*time.Minute, "the workspace is lost with its host", func() (bool, error) {
		got, err := p.client.Workspace(t.Context(), ws.ID)
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
