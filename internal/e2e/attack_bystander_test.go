package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/coppice-dev/coppice/runner/egress"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// bystander is Alice: a tenant who only works, on the host that is attacked.
type bystander struct {
	x      *assault
	client *coppice.Client
	ws     coppice.WorkspaceID
	ids    map[string]string // one object of each kind, by the prefix of its id
	secret string            // granted to her workspace
	watch  *watch

	stop context.CancelFunc
	wg   sync.WaitGroup

	mu     sync.Mutex // guards what follows
	took   []time.Duration
	faults []string
	worst  time.Duration
}

func newBystander(x *assault) *bystander {
	x.t.Helper()
	token, project := x.tenantKey("alice")
	x.keys = append(x.keys, token)
	b := &bystander{x: x, client: x.clientOf(token), secret: "sk-canary/8+" + rand.Text() + "=="}
	ctx := x.t.Context()
	ws, err := b.client.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{
		Image: string(image(x.t, "e2e", guestAgent)), Resources: small(), Network: coppice.NetworkRequest{Allow: &[]string{aliceHost}},
	})
	if err != nil {
		x.t.Fatal(err)
	}
	b.ws = ws.ID
	if _, err := b.client.PutGrant(ctx, ws.ID, "one", coppice.PutGrantRequest{AllowedHosts: []string{aliceHost}, Mode: "header", Secret: b.secret, Env: "ONE"}); err != nil {
		x.t.Fatal(err)
	}
	cp, err := b.client.CreateCheckpoint(ctx, ws.ID, coppice.CreateCheckpointRequest{Name: "alice"})
	if err != nil {
		x.t.Fatal(err)
	}
	s, err := b.client.StartSession(ctx, ws.ID, coppice.ExecRequest{Command: []string{"sleep", "100000"}})
	if err != nil {
		x.t.Fatal(err)
	}
	key, err := b.client.Self(ctx)
	if err != nil {
		x.t.Fatal(err)
	}
	b.ids = map[string]string{"ws": ws.ID, "ckpt": cp.ID, "sess": s.ID, "prj": project, "key": key.ID}
	return b
}

// begin has Alice work until end. The first rounds, before any attack, show what is usual.
func (b *bystander) begin() {
	b.x.t.Helper()
	for range 5 {
		b.round(b.x.t.Context())
	}
	if err := b.fault(); err != nil {
		b.x.t.Fatal(err)
	}
	b.x.t.Logf("before the attacks: %s", b)
	b.watch = newWatch(b.x)
	ctx, stop := context.WithCancel(b.x.t.Context())
	b.stop = stop
	b.wg.Go(func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for ctx.Err() == nil {
			b.round(ctx)
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	})
	b.wg.Go(func() { b.watch.run(ctx) })
	b.x.t.Cleanup(b.end)
}

func (b *bystander) end() {
	b.stop()
	b.wg.Wait()
}

// round runs a command that sends a request with her secret, and times it.
func (b *bystander) round(ctx context.Context) {
	began := time.Now()
	const script = `curl -sS -m 20 -H "Authorization: Bearer $ONE" https://` + aliceHost + `/alice`
	res, err := b.client.Exec(ctx, b.ws, coppice.ExecRequest{Command: []string{"/bin/sh", "-c", script}})
	took := time.Since(began)
	if ctx.Err() != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.took = append(b.took, took)
	b.worst = max(b.worst, took)
	switch want := "GET " + aliceHost + "/alice"; {
	case err != nil:
		b.faults = append(b.faults, err.Error())
	case !strings.Contains(res.Stdout, want):
		b.faults = append(b.faults, fmt.Sprintf("status %d, %q, %q", res.ExitCode, res.Stdout, res.Stderr))
	case took > maxAliceWait:
		b.faults = append(b.faults, fmt.Sprintf("it took %s", took))
	}
}

// fault says what went wrong since it was asked last.
func (b *bystander) fault() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	f := b.faults
	b.faults = nil
	if len(f) > 0 {
		return fmt.Errorf("%d of her rounds failed, first: %s", len(f), f[0])
	}
	return nil
}

// journal sends a request and waits until the API lists it.
func (b *bystander) journal() error {
	ctx, cancel := context.WithTimeout(b.x.t.Context(), time.Minute)
	defer cancel()
	path := "/journal-" + rand.Text()
	if _, err := b.client.Exec(ctx, b.ws, coppice.ExecRequest{Command: []string{"curl", "-sS", "-m", "20", "http://" + aliceHost + path}}); err != nil {
		return err
	}
	again := time.NewTicker(500 * time.Millisecond)
	defer again.Stop()
	for {
		for f, err := range b.client.Egress(ctx, b.ws, coppice.EgressFilter{}) {
			if err != nil {
				return err
			}
			if f.Path == path {
				return nil
			}
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return errors.New("a request that she made is not in her journal after a minute")
		}
	}
}

func (b *bystander) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := slices.Sorted(slices.Values(b.took))
	if len(all) == 0 {
		return "no round"
	}
	at := func(p float64) time.Duration { return all[int(p*float64(len(all)-1))].Round(time.Millisecond) }
	return fmt.Sprintf("%d rounds of the other tenant, p50 %s, p99 %s, worst %s", len(all), at(0.5), at(0.99), b.worst.Round(time.Millisecond))
}

// watch observes the processes and the disk of a stack.
type watch struct {
	x     *assault
	first map[string]lived // by their part in the stack
	base  int64            // bytes on the disk at the start

	mu   sync.Mutex // guards what follows
	peak map[string]int64
	gone []string
}

type lived struct {
	pid   int
	start string // in clock ticks
}

// memoryBounds are what the resident memory of each part may come to, in bytes. PostgreSQL is the sum of its processes' own memory.
var memoryBounds = map[string]int64{"server": 1 << 30, "egress": 384 << 20, "postgres": 1 << 30}

func newWatch(x *assault) *watch {
	x.t.Helper()
	w := &watch{x: x, peak: map[string]int64{}}
	w.first = w.parts()
	for _, part := range []string{"server", "egress", "postgres"} {
		if w.first[part].pid == 0 {
			x.t.Fatalf("no process is the %s: %v", part, w.first)
		}
	}
	w.base = w.size()
	return w
}

// parts finds the processes that must outlive every attack.
func (w *watch) parts() map[string]lived {
	out := map[string]lived{}
	add := func(part string, pid int) {
		if start, err := startOf(pid); err == nil {
			out[part] = lived{pid, start}
		}
	}
	add("server", w.x.s.cmd.Process.Pid)
	ctx, cancel := context.WithTimeout(w.x.t.Context(), 10*time.Second)
	defer cancel()
	if hello, err := egress.NewClient(egress.SocketPath(filepath.Join(w.x.s.runDir(), "egress"))).Hello(ctx); err == nil {
		add("egress", hello.PID)
	}
	for pid, cmdline := range allProcesses() {
		args := strings.Split(strings.TrimRight(string(cmdline), "\x00"), "\x00")
		if bytes.Contains(cmdline, []byte(w.x.s.data)) && filepath.Base(args[0]) == "postgres" && slices.Contains(args, "-D") {
			add("postgres", pid)
		}
	}
	return out
}

// startOf is when a process began, so that a new one with its number is not taken for it.
func startOf(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	const start = 19 // field 22, the first after the name being 3
	if len(fields) <= start {
		return "", fmt.Errorf("strange state of process %d", pid)
	}
	return fields[start], nil
}

func (w *watch) run(ctx context.Context) {
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		w.look()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (w *watch) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for part, p := range w.first {
		if start, err := startOf(p.pid); err != nil || start != p.start {
			if fault := part + " has ended or was started anew"; !slices.Contains(w.gone, fault) {
				w.gone = append(w.gone, fault)
			}
			continue
		}
		n := memoryOf(p.pid)
		if part == "postgres" {
			for _, child := range childrenOf(p.pid) {
				n += memoryOf(child)
			}
		}
		w.peak[part] = max(w.peak[part], n)
	}
}

// memoryOf is the memory of a process that it shares with nobody, plus its share of the rest, in bytes.
func memoryOf(pid int) int64 {
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "Pss:"); ok {
			kib, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kib << 10
		}
	}
	return 0
}

func childrenOf(pid int) []int {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", pid))
	var out []int
	for f := range strings.FieldsSeq(string(b)) {
		if n, err := strconv.Atoi(f); err == nil {
			out = append(out, n)
		}
	}
	return out
}

// fault says which process ended or took too much.
func (w *watch) fault() error {
	w.look()
	w.mu.Lock()
	defer w.mu.Unlock()
	faults := slices.Clone(w.gone)
	for part, n := range w.peak {
		if n > memoryBounds[part] {
			faults = append(faults, fmt.Sprintf("%s took %d MiB, at most %d are allowed", part, n>>20, memoryBounds[part]>>20))
		}
	}
	if len(faults) > 0 {
		return errors.New(strings.Join(faults, "; "))
	}
	return nil
}

// disk says that what is kept has grown too much.
func (w *watch) disk() error {
	if n := w.size() - w.base; n > maxGrowth {
		return fmt.Errorf("it grew by %d MiB, at most %d are allowed", n>>20, maxGrowth>>20)
	}
	return nil
}

// size is what the files of the stack take on the disk, in bytes.
func (w *watch) size() (n int64) {
	for _, dir := range []string{w.x.s.data, w.x.store} {
		_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() && d.Name() != "volume.xfs" {
				if info, err := d.Info(); err == nil { // files come and go
					n += info.Sys().(*syscall.Stat_t).Blocks * 512
				}
			}
			return nil
		})
	}
	return n
}

func (w *watch) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var parts []string
	for part, n := range w.peak {
		parts = append(parts, fmt.Sprintf("%s %d of %d MiB", part, n>>20, memoryBounds[part]>>20))
	}
	slices.Sort(parts)
	return fmt.Sprintf("memory at most: %s; disk grew by %d of %d MiB", strings.Join(parts, ", "), (w.size()-w.base)>>20, maxGrowth>>20)
}
