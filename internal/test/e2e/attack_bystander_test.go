package e2e

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// bystander is Alice: a tenant who only works, on the host that is attacked.
type bystander struct {
	x      *assault
	client *coppice.Client
	ws     coppice.WorkspaceID
	sess   coppice.SessionID // a program that runs all the time
	ids    map[string]string // one object of each kind, by the prefix of its id
	secret string            // granted to her workspace
	watch  *watch

	stop context.CancelFunc
	wg   sync.WaitGroup

	mu     sync.Mutex // guards what follows
	rounds int        // all of them
	took   []time.Duration
	faults []string
	bounds waits // of this phase
}

// waits bound how long Alice's rounds may take in one phase.
type waits struct{ calm, median, worst time.Duration }

// An absolute bound would say more about the machine than about the attack: whatever else runs on the machine slows every round. So a phase
// is compared with Alice's rounds right before it, without an attack, on the same machine beside the same other work. Her machine and the
// attacker's are emulated and share the cores with the attacker's programs outside, so an equal share of two busy cores already costs a
// factor of two to three. Beside much other work the attacker's share is smaller, and so is what it may cost.
const calmRounds = 5

func waitsAfter(calm []time.Duration) waits {
	m := median(calm)
	return waits{
		calm:   m,
		median: min(5*m+time.Second, max(5*m/2, 12*time.Second)),
		worst:  min(12*m+5*time.Second, max(5*m, 30*time.Second)),
	}
}

func median(list []time.Duration) time.Duration {
	if len(list) == 0 {
		return 0
	}
	return slices.Sorted(slices.Values(list))[len(list)/2]
}

func newBystander(x *assault) *bystander {
	x.t.Helper()
	token, project := x.tenantKey("alice")
	x.keys = append(x.keys, token)
	b := &bystander{x: x, client: x.clientOf(token), secret: "sk-canary/8+" + rand.Text() + "=="}
	ctx := x.t.Context()
	ws, err := b.client.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{
		Image: string(baseImage(x.t)), Resources: small(), Network: coppice.NetworkRequest{Allow: &[]string{aliceHost}},
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
	if _, err := b.client.WaitSealed(ctx, cp.ID); err != nil { // so that the store does not grow by it later
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
	b.sess = s.ID
	b.ids = map[string]string{"ws": ws.ID, "ckpt": cp.ID, "sess": s.ID, "prj": project, "key": key.ID}
	return b
}

// begin has Alice work until end. The first rounds, before any attack, must succeed.
func (b *bystander) begin() {
	b.x.t.Helper()
	b.bounds = waits{median: time.Minute, worst: time.Minute} // nothing is known yet
	for range calmRounds {
		b.round(b.x.t.Context())
	}
	if err := b.fault(); err != nil {
		b.x.t.Fatal(err)
	}
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

// settle waits for some rounds without an attack, and sets the bounds of the next phase by them.
func (b *bystander) settle() {
	b.x.t.Helper()
	b.await(1) // it may have begun beside the last phase
	b.mu.Lock()
	b.took = nil
	b.mu.Unlock()
	b.await(calmRounds)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bounds, b.took = waitsAfter(b.took), nil
}

// await waits for so many more rounds.
func (b *bystander) await(more int) {
	b.x.t.Helper()
	ctx, cancel := context.WithTimeout(b.x.t.Context(), 5*time.Minute)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	done := func() int {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.rounds
	}
	for from := done(); done() < from+more; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			b.x.t.Fatalf("the other tenant's rounds do not end: %v", context.Cause(ctx))
		}
	}
}

// round runs a command that sends a request with her secret, and times it.
func (b *bystander) round(ctx context.Context) {
	began := time.Now()
	const script = `curl -sS -m 60 -H "Authorization: Bearer $ONE" https://` + aliceHost + `/alice`
	res, err := b.client.Exec(ctx, b.ws, coppice.ExecRequest{Command: []string{"/bin/sh", "-c", script}})
	took := time.Since(began)
	if ctx.Err() != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rounds++
	b.took = append(b.took, took)
	switch want := "GET " + aliceHost + "/alice"; {
	case err != nil:
		b.faults = append(b.faults, err.Error())
	case !strings.Contains(res.Stdout, want):
		b.faults = append(b.faults, fmt.Sprintf("status %d, %q, %q", res.ExitCode, res.Stdout, res.Stderr))
	case took > b.bounds.worst:
		b.faults = append(b.faults, fmt.Sprintf("it took %s, at most %s are allowed", took, b.bounds.worst))
	}
}

// fault says what went wrong since it was asked last.
func (b *bystander) fault() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	f := b.faults
	b.faults = nil
	if m := median(b.took); m > b.bounds.median {
		f = append(f, fmt.Sprintf("half of %d rounds took %s or more, at most %s are allowed", len(b.took), m, b.bounds.median))
	}
	if len(f) > 0 {
		return fmt.Errorf("%d of her rounds failed, first: %s", len(f), f[0])
	}
	return nil
}

// lives says whether what she started before the attacks still runs.
func (b *bystander) lives() error {
	ctx, cancel := context.WithTimeout(b.x.t.Context(), time.Minute)
	defer cancel()
	s, err := b.client.Session(ctx, b.sess)
	if err == nil && s.State != coppice.SessionRunning {
		err = fmt.Errorf("her program is %s", s.State)
	}
	return err
}

// journal sends a request and waits until the API lists it.
func (b *bystander) journal() error {
	ctx, cancel := context.WithTimeout(b.x.t.Context(), time.Minute)
	defer cancel()
	path := "/journal-" + rand.Text()
	if _, err := b.client.Exec(ctx, b.ws, coppice.ExecRequest{Command: []string{"curl", "-sS", "-m", "60", "http://" + aliceHost + path}}); err != nil {
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
	return fmt.Sprintf("%d rounds of the other tenant, p50 %s of %s, worst %s of %s; %s before", len(all), at(0.5), b.bounds.median.Round(time.Millisecond),
		at(1), b.bounds.worst.Round(time.Millisecond), b.bounds.calm.Round(time.Millisecond))
}
