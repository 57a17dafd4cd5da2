package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/runner"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/netns"
	"github.com/coppice-dev/coppice/runner/sandboxnet"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/volume"
)

// lab is a runner in this process, with parts of a runner for measurements that are not possible through REST.
type lab struct {
	cfg       config
	clusterID string
	cluster   string // in the names of its VMMs
	dir       string // files, on the volume
	runDir    string // sockets; short
	image     images.Image
	volume    *volume.Volume
	network   sandboxnet.Network
	driver    vmm.Driver
	bases     *memory.BaseStore // of the machines that are no sandboxes
	runner    *runner.Runner

	stop context.CancelFunc
	done chan error

	mu   sync.Mutex // guards next
	next int        // number of the next identity
}

const labVolume = 16 << 30 // sparse

func openLab(ctx context.Context, cfg config, dir string) (_ *lab, err error) {
	l := &lab{cfg: cfg}
	l.clusterID = "bench of " + dir
	l.cluster = core.DigestOf([]byte(l.clusterID)).Hex()[:8]
	l.runDir = "/run/coppice/bench-" + l.cluster
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close(ctx))
		}
	}()
	if err := errors.Join(killLeftovers(l.cluster), os.RemoveAll(l.runDir), os.MkdirAll(l.runDir, 0o700), os.MkdirAll(dir, 0o700)); err != nil {
		return nil, err
	}
	store, err := images.Open(cfg.images)
	if err != nil {
		return nil, err
	}
	if l.image, err = store.Get(cfg.image); err != nil {
		return nil, err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if l.volume, err = volume.Open(ctx, dir, labVolume, log); err != nil {
		return nil, err
	}
	l.dir = filepath.Join(l.volume.Path, "machines")
	if err := errors.Join(os.RemoveAll(l.dir), os.MkdirAll(l.dir, 0o700)); err != nil {
		return nil, err
	}
	pool, err := netns.NewPool(netns.Config{ClusterID: l.clusterID, Warm: 6, Log: log})
	if err != nil {
		return nil, err
	}
	l.network = sandboxnet.Of(pool, false)
	var others map[string]vmm.Driver
	l.driver, others = cfg.hostConfig().Drivers()
	l.runner, err = runner.New(ctx, runner.Config{
		ID: core.NewID[core.RunnerID](), ClusterID: l.clusterID, DataDir: filepath.Join(l.volume.Path, "runner"),
		RunDir: filepath.Join(l.runDir, "r"), Driver: l.driver, Others: others, Images: store, Network: l.network, Log: log,
		FirstUID: firstUID, Warm: 2, Lease: 24 * time.Hour, // there is no controller
	})
	if err != nil {
		return nil, errors.Join(err, pool.Close(ctx))
	}
	if l.bases, err = memory.NewBaseStore(filepath.Join(l.dir, "bases"), !l.driver.Capabilities().ReadOnlyBase); err != nil {
		return nil, errors.Join(err, pool.Close(ctx))
	}
	l.run(ctx, pool)
	return l, nil
}

// firstUID is the first user of the lab's VMMs: above the ids that distributions assign and that `coppice dev` uses.
const firstUID = 699_000_000

// run does the background work until close.
func (l *lab) run(ctx context.Context, pool *netns.Pool) {
	ctx, l.stop = context.WithCancel(context.WithoutCancel(ctx))
	l.done = make(chan error, 1)
	go func() {
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { return pool.Run(ctx) })
		group.Go(func() error { return l.runner.Run(ctx) })
		err := group.Wait()
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
		defer cancel()
		l.done <- errors.Join(err, pool.Close(clean))
	}()
}

func (l *lab) close(ctx context.Context) error {
	var errs []error
	if l.stop != nil {
		l.stop()
		select {
		case err := <-l.done:
			errs = append(errs, err)
		case <-ctx.Done():
			errs = append(errs, context.Cause(ctx))
		}
	}
	errs = append(errs, killLeftovers(l.cluster), os.RemoveAll(l.runDir))
	if l.volume != nil {
		errs = append(errs, l.volume.Close())
	}
	return errors.Join(errs...)
}

// child is a new identity.
func (l *lab) child() runnerapi.Child {
	l.mu.Lock()
	l.next++
	n := l.next
	l.mu.Unlock()
	id := make([]byte, 16)
	_, _ = rand.Read(id) // never fails: crypto/rand ends the program instead
	return runnerapi.Child{
		SandboxID: core.NewID[core.SandboxID](), WorkspaceID: core.NewID[core.WorkspaceID](), Egress: core.EgressDenyAll,
		Identity: core.Identity{
			Generation: string(core.NewID[core.OperationID]()), Hostname: fmt.Sprintf("bench-%d", n), MachineID: hex.EncodeToString(id),
			MAC: fmt.Sprintf("02:be:00:00:%02x:%02x", n>>8&0xff, n&0xff), IP: netip.AddrFrom4([4]byte{10, 83, byte(1 + n>>8), byte(n)}), //nolint:gosec // G115: a few hundred
		},
	}
}

// fork makes one sealed sandbox.
func (l *lab) fork(ctx context.Context, id core.CheckpointID) (core.SandboxID, error) {
	f, err := l.runner.Fork(ctx, runnerapi.Fork{CheckpointID: id, Children: []runnerapi.Child{l.child()}})
	if err != nil {
		return "", err
	}
	c := f.Children[0]
	return c.SandboxID, c.Problem.Err()
}

// exec runs a command in a sandbox of the lab's runner.
func (l *lab) exec(ctx context.Context, id core.SandboxID, command ...string) error {
	h, err := l.runner.Guest(ctx, id, failed)
	if err != nil {
		return err
	}
	return execThrough(ctx, h, command...)
}

// settle waits for the runner's warm shells.
func (l *lab) settle(ctx context.Context, memoryMiB, others int) error {
	return awaitVMMs(ctx, l.cluster, memoryMiB, others+2)
}

// execThrough starts a command and waits for its end, like the controller.
func execThrough(ctx context.Context, guest http.Handler, command ...string) error {
	spec, err := json.Marshal(guestapi.SessionSpec{Command: command, Cwd: "/"})
	if err != nil {
		return err
	}
	var s guestapi.Session
	if err := ask(ctx, guest, http.MethodPost, guestapi.PathSessions, spec, &s); err != nil {
		return err
	}
	for s.State != guestapi.SessionExited {
		path := guestapi.PathSessions + "/" + string(s.ID) + "/wait?timeout_ms=60000"
		if err := ask(ctx, guest, http.MethodGet, path, nil, &s); err != nil {
			return err
		}
	}
	if s.ExitCode == nil || *s.ExitCode != 0 {
		return fmt.Errorf("exec %q ended with %v", command, s.ExitCode)
	}
	return nil
}

func ask(ctx context.Context, guest http.Handler, method, path string, body []byte, out any) error {
	req, err := http.NewRequestWithContext(ctx, method, "http://guest"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	answer := &recorder{header: http.Header{}}
	guest.ServeHTTP(answer, req)
	if answer.status >= http.StatusBadRequest {
		return fmt.Errorf("%s %s: status %d: %s", method, path, answer.status, core.Clip(answer.body.String()))
	}
	return json.Unmarshal(answer.body.Bytes(), out)
}

// recorder keeps an answer.
type recorder struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) WriteHeader(status int)      { r.status = status }
func (r *recorder) Write(b []byte) (int, error) { return r.body.Write(b) }

func failed(w http.ResponseWriter, _ *http.Request, err error) {
	w.WriteHeader(http.StatusBadGateway)
	_, _ = io.WriteString(w, err.Error()) // a recorder, which never fails
}

// uptime bounds how long anything in a guest may take.
const guestTime = 2 * time.Minute
