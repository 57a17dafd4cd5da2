package fakevmm_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/guest"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
)

// TestForkLife takes a guest through capture, reseed, forks, reseal and release.
func TestForkLife(t *testing.T) {
	t.Parallel()
	h := newHost(t, fakevmm.Config{})
	parent, base := h.boot(t)
	agent := dial(t, parent)
	run(t, agent, "inc; inc")
	put(t, agent, "kept\n")
	waiting := start(t, agent, guestapi.SessionSpec{Command: []string{"sh", "-c", "cat; inc"}, StdinOpen: true})
	tmpl := h.capture(t, parent, base, agent, "capture-1")

	// The parent can go on only after it was reseeded.
	if err := parent.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	health, err := agent.Health(t.Context())
	if err != nil || health.State != guestapi.StateFrozen {
		t.Fatalf("the captured guest is %+v (%v)", health, err)
	}
	release := guestapi.ReleaseRequest{Generation: health.Generation}
	if _, err := agent.Release(t.Context(), release); core.CodeOf(err) != guestapi.CodeWrongState {
		t.Errorf("release before reseed: %v", err)
	}
	res, err := agent.Reseed(t.Context(), guestapi.ReseedRequest{Entropy: resealRequest().Entropy, Generation: health.Generation})
	if err := errors.Join(err, guest.VerifyReseed(res)); err != nil {
		t.Fatal(err)
	}
	if _, err := agent.Release(t.Context(), release); err != nil {
		t.Fatal(err)
	}
	closeStdin(t, agent, waiting.ID)
	if s := wait(t, agent, waiting.ID); *s.ExitCode != 0 {
		t.Errorf("the parent's session ended as %+v", s)
	}
	parentDraw, _ := run(t, agent, "random")
	run(t, agent, "inc")
	put(t, agent, "parent\n")

	draws := map[string]bool{parentDraw: true}
	for range 3 {
		child := dial(t, h.fork(t, tmpl))
		req := resealRequest()
		if _, err := child.Release(t.Context(), guestapi.ReleaseRequest{Generation: health.Generation}); err == nil {
			t.Error("a clone was released under its parent's generation")
		}
		if _, err := reseal(t.Context(), child, req); err != nil {
			t.Fatal(err)
		}
		if _, err := child.Reseal(t.Context(), req); core.CodeOf(err) != guestapi.CodeAlreadySealed {
			t.Errorf("a generation was used twice: %v", err)
		}
		// The session that waited in the parent waits here too.
		closeStdin(t, child, waiting.ID)
		if s := wait(t, child, waiting.ID); *s.ExitCode != 0 {
			t.Errorf("the child's session ended as %+v", s)
		}
		got, _ := run(t, child, "inc; cat /f")
		if want := "4\nkept\n"; got != want {
			t.Errorf("the child knows %q, want %q", got, want)
		}
		draw, _ := run(t, child, "random")
		if draws[draw] {
			t.Error("two machines drew the same")
		}
		draws[draw] = true
	}
}

// TestUnsealedClonesDrawTheSame shows why the other tests are meaningful.
func TestUnsealedClonesDrawTheSame(t *testing.T) {
	t.Parallel()
	h := newHost(t, fakevmm.Config{})
	parent, base := h.boot(t)
	tmpl := h.capture(t, parent, base, dial(t, parent), "c")
	h.driver.Arm(fakevmm.Fault{Step: fakevmm.ResealStep(guestapi.StepEntropy), Kind: fakevmm.Lie})
	var seen []string
	for range 2 {
		report, err := reseal(t.Context(), dial(t, h.fork(t, tmpl)), resealRequest())
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, report.Steps[0].Evidence["draw_00"])
	}
	if seen[0] != seen[1] {
		t.Errorf("clones that were not reseeded drew %q", seen)
	}
}

// TestResealFaults: a fault in any step of the reseal prevents the release.
func TestResealFaults(t *testing.T) {
	t.Parallel()
	h := newHost(t, fakevmm.Config{})
	parent, base := h.boot(t)
	tmpl := h.capture(t, parent, base, dial(t, parent), "c")
	for _, c := range []struct {
		step string
		kind fakevmm.Kind
	}{
		{guestapi.StepEntropy, fakevmm.Fail},
		{guestapi.StepClock, fakevmm.Lie},
		{guestapi.StepMachineID, fakevmm.Lie},
		{guestapi.StepHostname, fakevmm.Fail},
		{guestapi.StepNetwork, fakevmm.Lie},
		{guestapi.StepGeneration, fakevmm.Lie},
		{guestapi.StepHooks, fakevmm.Fail},
	} {
		disarm := h.driver.Arm(fakevmm.Fault{Step: fakevmm.ResealStep(c.step), Kind: c.kind})
		_, err := reseal(t.Context(), dial(t, h.fork(t, tmpl)), resealRequest())
		var step *guest.StepError
		if !errors.As(err, &step) || step.Step != c.step {
			t.Errorf("%s at %s: got %v", c.kind, c.step, err)
		}
		disarm()
	}
}

func TestFaults(t *testing.T) {
	t.Parallel()
	h := newHost(t, fakevmm.Config{})
	parent, base := h.boot(t)
	tmpl := h.capture(t, parent, base, dial(t, parent), "c")
	ours := errors.New("ours")
	fail := func(step fakevmm.Step) func() {
		return h.driver.Arm(fakevmm.Fault{Step: step, Kind: fakevmm.Fail, Err: ours, Times: 1})
	}

	fail(fakevmm.StepSpawn)
	if _, err := h.driver.Spawn(t.Context(), vmm.Spec{}); !errors.Is(err, ours) {
		t.Errorf("spawn: %v", err)
	}
	m := h.fork(t, tmpl)
	for step, call := range map[fakevmm.Step]func() error{
		fakevmm.StepPause:  func() error { return m.Pause(t.Context()) },
		fakevmm.StepResume: func() error { return m.Resume(t.Context()) },
		fakevmm.StepDial:   func() error { _, err := m.DialAgent(t.Context()); return err },
		fakevmm.StepKill:   func() error { return m.Kill(t.Context()) },
	} {
		fail(step)
		if err := call(); !errors.Is(err, ours) {
			t.Errorf("%s: %v", step, err)
		}
	}

	// A hang ends with the context, and with the machine.
	disarm := h.driver.Arm(fakevmm.Fault{Step: fakevmm.StepPause, Kind: fakevmm.Hang})
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(ours)
	if err := m.Pause(ctx); !errors.Is(err, ours) {
		t.Errorf("a hang: %v", err)
	}
	hung := make(chan error)
	go func() { hung <- m.Pause(t.Context()) }()
	h.driver.Crash(m.Handle())
	if err := <-hung; !errors.Is(err, vmm.ErrGone) {
		t.Errorf("a hang of a machine that ends: %v", err)
	}
	disarm()

	other := h.spawn(t, tmpl.base, true)
	h.driver.Arm(fakevmm.Fault{Step: fakevmm.StepInject, Kind: fakevmm.Die, Times: 1})
	if err := other.Restore(t.Context(), tmpl.restore()); !errors.Is(err, vmm.ErrGone) {
		t.Errorf("a death: %v", err)
	}
	<-other.Done()

	// It fails only the second time.
	again := h.fork(t, tmpl)
	h.driver.Arm(fakevmm.Fault{Step: fakevmm.StepPause, Kind: fakevmm.Fail, Skip: 1, Times: 1})
	for i, want := range []bool{true, false, true} {
		if err := again.Pause(t.Context()); (err == nil) != want {
			t.Errorf("pause %d: %v", i, err)
		}
	}

	agent := dial(t, h.fork(t, tmpl))
	h.driver.Arm(fakevmm.Fault{Step: fakevmm.AgentStep("reseal"), Kind: fakevmm.Fail, Times: 1})
	if _, err := agent.Reseal(t.Context(), resealRequest()); err == nil {
		t.Error("the agent resealed in spite of a fault")
	}
	h.driver.Arm(fakevmm.Fault{Step: fakevmm.AgentStep("handshake"), Kind: fakevmm.Hang, Times: 1})
	short, cancelShort := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancelShort()
	if c, err := guest.Dial(short, h.fork(t, tmpl).DialAgent); err == nil {
		t.Error("an agent that hangs was reached")
		_ = c.Close()
	}
}

// TestManyForks makes a thousand sandboxes at once, like a runner.
func TestManyForks(t *testing.T) {
	t.Parallel()
	const (
		n       = 1000
		atATime = 32 // as a runner bounds it
	)
	h := newHost(t, fakevmm.Config{})
	parent, base := h.boot(t)
	agent := dial(t, parent)
	run(t, agent, "inc")
	tmpl := h.capture(t, parent, base, agent, "c")
	begin := time.Now()
	var (
		group    errgroup.Group
		mu       sync.Mutex // guards machines
		machines []vmm.Machine
	)
	group.SetLimit(atATime)
	for range n {
		group.Go(func() error {
			m, err := h.forkSealed(t.Context(), tmpl)
			if m != nil {
				mu.Lock()
				machines = append(machines, m)
				mu.Unlock()
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
	t.Logf("%d forks to released in %s", n, time.Since(begin).Round(time.Millisecond))
	if got := h.driver.Machines(); got != n+1 {
		t.Errorf("there are %d machines, want %d", got, n+1)
	}
	begin = time.Now()
	var wg sync.WaitGroup
	for _, m := range machines {
		wg.Go(func() {
			if err := m.Kill(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	t.Logf("killed in %s", time.Since(begin).Round(time.Millisecond))
	if got := h.driver.Machines(); got != 1 {
		t.Errorf("there are %d machines, want 1", got)
	}
}

// forkSealed makes a sandbox and closes the connection to it.
func (h *host) forkSealed(ctx context.Context, tmpl *template) (vmm.Machine, error) {
	m, err := h.driver.Spawn(ctx, vmm.Spec{
		ID: core.NewID[core.SandboxID](), Dir: h.dir, MemoryMiB: memoryMiB, Base: tmpl.base.File(), Restore: true,
	})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(m.Restore(ctx, tmpl.restore()), m.Resume(ctx)); err != nil {
		return m, err
	}
	agent, err := guest.Dial(ctx, func(ctx context.Context) (net.Conn, error) { return m.DialAgent(ctx) })
	if err != nil {
		return m, err
	}
	defer agent.Close()
	_, err = reseal(ctx, agent, resealRequest())
	return m, err
}
