package runner

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/egresslink"
	"github.com/coppice-dev/coppice/runner/guest"
	"github.com/coppice-dev/coppice/runner/journal"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/portforward"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// sandbox is a shell that became a machine: it has a state, an identity and, after its release, a running workload.
type sandbox struct {
	*shell

	// An operation that changes the sandbox holds work: a fork until it is ready, a capture, a destruction. It is a channel
	// of one so that waiting for it ends with a context.
	work chan struct{}

	gone chan struct{} // closed when everything of it has been taken down
	left chan struct{} // closed when it was left to the runner's successor

	reseal  *core.ResealReport // of its making; guarded by work
	refused refusals           // guarded by work
	// next is the sandbox that replaced this one, because its prepared machine could not be claimed; nil: none did. It is set before gone is closed.
	next *sandbox
	// attestation is this runner's signed report of the reseal; nil if no controller had certified the runner. It is set once, before the
	// sandbox is ready.
	attestation []byte

	authority string // the certificate with which it was made, as PEM; empty if it was made without, or by an earlier runner

	notes *journal.Notes // its part of the journal

	waits lazy.Waits         // for images that the pager serves
	ports *portforward.Ports // never nil

	destroyed atomic.Bool // Destroy was called: the child must not be made of another machine
	silent    atomic.Bool // its machine was prepared, and the guest has not answered its fork: what it has used is not the workspace's

	egress *egresslink.Sandbox // its rules, and what the egress process has of them; never nil

	mu   sync.Mutex // guards what follows
	info runnerapi.Sandbox
	why  string // the reason if the runner ended its VMM on purpose
	// Of a machine that has memory from the pager; see updateStalls.
	waited time.Time // when it was last seen waiting for the store
	frozen bool      // a capture failed and could not be undone
	waking bool      // and is being thawed
	guest  *guest.Client
}

// newSandbox returns the sandbox that a shell becomes. noted is what its journal has, for one of an earlier runner.
func newSandbox(r *Runner, sh *shell, id core.SandboxID, info runnerapi.Sandbox, noted *journal.Sandbox) *sandbox {
	info.ID, info.StartedAt = id, time.Now()
	s := &sandbox{shell: sh, work: make(chan struct{}, 1), gone: make(chan struct{}), left: make(chan struct{}), info: info}
	s.notes = journal.NewNotes(noted, sh.writeJournal)
	s.ports, s.egress = portsOf(r, s), egressOf(r, s)
	return s
}

func (s *sandbox) lock(ctx context.Context) error {
	select {
	case s.work <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for another operation on sandbox %s: %w", s.info.ID, context.Cause(ctx))
	}
}

func (s *sandbox) unlock() { <-s.work }

// tryLock is lock for background work. ok is false if another operation is under way, or the sandbox has ended or was left.
func (s *sandbox) tryLock() (release func(), ok bool) {
	select {
	case s.work <- struct{}{}:
	default:
		return nil, false
	}
	select {
	case <-s.gone:
	case <-s.left:
	default:
		return s.unlock, true
	}
	s.unlock()
	return nil, false
}

func (s *sandbox) snapshot() runnerapi.Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.info
}

// end kills the VMM of a sandbox. Then the watcher takes the sandbox down and remembers it as dead, with the reason.
func (s *sandbox) end(ctx context.Context, why string) error {
	s.mu.Lock()
	if s.why == "" {
		s.why = why
	}
	s.mu.Unlock()
	return s.machine.Kill(ctx)
}

// doomed reports whether the sandbox is to be ended, or has been.
func (s *sandbox) doomed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.destroyed.Load() || s.why != ""
}

func (s *sandbox) setState(state runnerapi.SandboxState) {
	s.mu.Lock()
	s.info.State = state
	s.mu.Unlock()
}

// agent returns a connection to the guest agent. It makes a new one if the last one has ended.
func (s *sandbox) agent(ctx context.Context) (*guest.Client, error) {
	s.mu.Lock()
	c := s.guest
	s.mu.Unlock()
	if c != nil {
		select {
		case <-c.Done():
		default:
			return c, nil
		}
	}
	return s.dial(ctx, c, s.machine.DialAgent)
}

// agentOn is agent for a machine that has a connection on which the greeting is still missing.
func (s *sandbox) agentOn(ctx context.Context, first net.Conn) (*guest.Client, error) {
	return s.dial(ctx, nil, func(ctx context.Context) (net.Conn, error) {
		if conn := first; conn != nil {
			first = nil
			return conn, nil
		}
		return s.machine.DialAgent(ctx)
	})
}

func (s *sandbox) dial(ctx context.Context, last *guest.Client, connect func(context.Context) (net.Conn, error)) (*guest.Client, error) {
	fresh, err := guest.Dial(ctx, connect)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.guest != nil && s.guest != last { // another caller was faster; the port carries one connection
		return s.guest, fresh.Close()
	}
	s.guest = fresh
	return fresh, nil
}

// hangUp ends the connection to the guest agent.
func (s *sandbox) hangUp() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.guest == nil {
		return nil
	}
	return s.guest.Close()
}

// entropy returns random bytes to reseed a guest with.
func entropy(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails: crypto/rand ends the program instead
	return b
}

// find returns a living sandbox.
func (r *Runner) find(id core.SandboxID) (*sandbox, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.sandboxes[id]
	if !ok {
		return nil, core.Errorf(core.NotFound, core.CodeSandboxNotFound, "sandbox %s is not on this runner", id)
	}
	return s, nil
}

// Sandboxes lists all sandboxes, including dead ones that were not acknowledged yet.
func (r *Runner) Sandboxes() []runnerapi.Sandbox {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]runnerapi.Sandbox, 0, len(r.sandboxes)+len(r.dead))
	for _, s := range r.sandboxes {
		out = append(out, s.snapshot())
	}
	for _, d := range r.dead {
		out = append(out, d)
	}
	return out
}

// Sandbox describes one.
func (r *Runner) Sandbox(id core.SandboxID) (runnerapi.Sandbox, error) {
	r.mu.Lock()
	d, dead := r.dead[id]
	r.mu.Unlock()
	if dead {
		return d, nil
	}
	s, err := r.find(id)
	if err != nil {
		return runnerapi.Sandbox{}, err
	}
	return s.snapshot(), nil
}

// Console returns the printable tail of a sandbox's console.
func (r *Runner) Console(id core.SandboxID) (string, error) {
	s, err := r.find(id)
	if err != nil {
		return "", err
	}
	return s.machine.Console(), nil
}

// Usages returns what sandboxes have used since their start: the living ones, and ended ones that were not acknowledged.
func (r *Runner) Usages() []runnerapi.Usage { return r.usages.List(r.charged()) }

// charged are the machines whose use is a workspace's.
func (r *Runner) charged() map[core.SandboxID]vmm.Handle {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make(map[core.SandboxID]vmm.Handle, len(r.sandboxes))
	for id, s := range r.sandboxes {
		if !s.silent.Load() {
			out[id] = s.machine.Handle()
		}
	}
	return out
}

// ForgetUsages drops the usage of sandboxes that was acknowledged.
func (r *Runner) ForgetUsages(sent []runnerapi.Usage) { r.usages.Forget(sent) }

// Forget forgets dead sandboxes whose end was reported.
func (r *Runner) Forget(ids ...core.SandboxID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range ids {
		delete(r.dead, id)
	}
}

// Destroy ends a sandbox and takes everything of it down. It is no error if there is no such sandbox.
func (r *Runner) Destroy(ctx context.Context, id core.SandboxID) error {
	r.Forget(id)
	s := r.doom(id)
	if s == nil {
		return nil
	}
	if err := s.lock(ctx); err != nil {
		return err
	}
	defer s.unlock()
	return r.destroyLocked(context.WithoutCancel(ctx), s)
}

// doom finds a sandbox that will be destroyed, or nil. A fork that waits for another machine for it must not register that.
func (r *Runner) doom(id core.SandboxID) *sandbox {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sandboxes[id]
	if s != nil {
		s.destroyed.Store(true)
	}
	return s
}

// destroyLocked takes a sandbox down. The caller holds s.work. A second call does nothing.
func (r *Runner) destroyLocked(ctx context.Context, s *sandbox) error {
	select {
	case <-s.gone:
		return nil
	default:
	}
	if !s.silent.Load() {
		r.usages.End(s.info.ID, s.machine.Handle())
	}
	if err := r.endMachine(ctx, s); err != nil {
		return err
	}
	r.forget(s)
	return nil
}

// endMachine takes down everything of a sandbox but its entry. The caller holds s.work.
func (r *Runner) endMachine(ctx context.Context, s *sandbox) error {
	s.ports.CloseAll()
	s.egress.End(ctx)
	_ = s.hangUp() // the guest is about to end anyway
	return r.dismantle(ctx, s.shell)
}

// forget removes the entry of a sandbox that was taken down, unless another one has it already.
func (r *Runner) forget(s *sandbox) {
	r.mu.Lock()
	if r.sandboxes[s.info.ID] == s {
		delete(r.sandboxes, s.info.ID)
	}
	r.mu.Unlock()
	close(s.gone)
	r.wake() // so that the controller learns how much is free
}

// watch waits for the end of a sandbox's VMM. If the VMM ends by itself, the sandbox is taken down, and remembered as dead until this was
// reported. It is never started again.
func (r *Runner) watch(s *sandbox) {
	defer r.wg.Done()
	select {
	case <-s.gone:
		return
	case <-s.left:
		return
	case <-s.machine.Done():
	}
	if err := s.lock(r.runCtx); err != nil {
		return // the runner stops; its end takes everything down, or leaves it
	}
	defer s.unlock()
	if r.runCtx.Err() != nil {
		return // likewise
	}
	select {
	case <-s.gone: // it was destroyed on purpose
		return
	default:
	}
	exit := s.machine.Exit()
	info := s.snapshot()
	info.State = runnerapi.SandboxDead
	info.Exit = exit.Describe()
	s.mu.Lock()
	why := s.why
	s.mu.Unlock()
	if noMemory := s.Pager != "" && strings.Contains(exit.Status, syscall.SIGBUS.String()); noMemory && why == "" {
		// It died before the runner knew that the pager had died, or that its memory was damaged.
		info.Exit += "\nmemory that the pager serves could not be read"
		why = r.lazy.Damage(r.runCtx, s.lazyMachine())
		s.mu.Lock()
		why = cmp.Or(s.why, why) // a more exact reason may have been set meanwhile
		s.mu.Unlock()
	}
	if why != "" {
		info.Exit = why
	}
	r.mu.Lock()
	r.dead[info.ID] = info
	r.mu.Unlock()
	r.cfg.Log.Warn("sandbox died", "sandbox_id", info.ID, "workspace_id", info.WorkspaceID, "exit", exit.Status)
	if err := r.destroyLocked(context.WithoutCancel(r.runCtx), s); err != nil {
		r.cfg.Log.Error("dead sandbox was not taken down", "sandbox_id", info.ID, "err", err)
	}
	r.wake()
}

// Guest returns a handler for the public routes of a sandbox's agent. fail answers if the guest cannot be reached.
func (r *Runner) Guest(ctx context.Context, id core.SandboxID, fail func(http.ResponseWriter, *http.Request, error)) (http.Handler, error) {
	s, err := r.find(id)
	if err != nil {
		return nil, err
	}
	switch state := s.snapshot().State; state {
	case runnerapi.SandboxReady, runnerapi.SandboxPaused: // a pause is short; the request waits
	case runnerapi.SandboxStarting, runnerapi.SandboxQuarantined, runnerapi.SandboxDead:
		return nil, core.Errorf(core.FailedPrecondition, core.CodeWorkspaceNotReady, "sandbox %s is %s; it takes requests once it is ready", id, state)
	}
	if err := s.stalled(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, r.cfg.GuestTimeout)
	defer cancel()
	c, err := s.agent(ctx)
	if err != nil {
		return nil, cmp.Or(s.stalled(), err)
	}
	return c.Proxy(func(w http.ResponseWriter, q *http.Request, err error) { fail(w, q, cmp.Or(s.stalled(), err)) }), nil
}

// close stops all sandboxes and shells, or leaves the sandboxes for a successor. Checkpoints stay.
func (r *Runner) close(ctx context.Context) error {
	all := r.all()
	errs := make([]error, len(all)+1)
	var wg sync.WaitGroup
	for i, s := range all {
		wg.Go(func() {
			if errs[i] = s.lock(ctx); errs[i] != nil {
				return
			}
			defer s.unlock()
			if r.leave.Load() {
				s.leave()
				return
			}
			errs[i] = r.destroyLocked(ctx, s)
		})
	}
	wg.Go(func() { errs[len(all)] = errors.Join(r.prepared.Close(ctx), r.warm.Close(ctx)) })
	wg.Wait()
	if !r.leave.Load() {
		errs = append(errs, r.lazy.Stop(ctx))
	}
	if !r.leave.Load() || len(r.all()) == 0 { // there is no sandbox left to serve
		errs = append(errs, r.egress.Stop(ctx))
	}
	return errors.Join(errs...)
}

func (r *Runner) all() []*sandbox {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.sandboxes))
}

// leave closes what the runner has open of a sandbox that continues to live. The caller holds s.work.
func (s *sandbox) leave() {
	select {
	case <-s.gone:
		return
	default:
	}
	s.ports.CloseAll()
	_ = s.hangUp() // sessions continue in the guest
	close(s.left)
	s.machine.Release()
	s.letGo()
}
