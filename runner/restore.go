package runner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/guest"
	"github.com/coppice-dev/coppice/runner/journal"
	"github.com/coppice-dev/coppice/runner/sequence"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// restoration is what happens to a shell until it is a sandbox that is ready.
type restoration struct {
	r     *Runner
	s     *sandbox
	ckpt  *checkpoints.Opened
	child runnerapi.Child

	began       time.Time
	asked       bool // the guest was asked to reseal itself
	agent       *guest.Client
	report      *core.ResealReport // nil until the guest has answered
	claimed     *preparedMachine   // nil: it was not prepared, or was not reached yet
	attestation []byte
}

// restoreAndReseal gives a shell the state of a checkpoint and an identity of its own: restore, quarantine, reseal, verify, release.
// A prepared machine has the state already and is in quarantine; it goes through the same steps from the identity of its namespace on.
func (r *Runner) restoreAndReseal(ctx context.Context, s *sandbox, ckpt *checkpoints.Opened, child runnerapi.Child, prepared bool, watch *core.Stopwatch) (*core.ResealReport, error) {
	child.Egress = r.egress.OpenedWith(child.Egress)
	m := &restoration{r: r, s: s, ckpt: ckpt, child: child, began: time.Now()}
	list := []sequence.Step{
		{Does: "list the sandbox", Then: forkListed},
		{Does: "announce the sandbox in the journal", Then: forkJournaled, Do: m.announce},
	}
	assign := sequence.Step{Does: "give the namespace its identity", Then: forkAssigned, Do: m.assign}
	if prepared {
		list = append(list, sequence.Step{Does: "claim the prepared machine", Then: prepareClaimed, Do: m.claim}, assign, sequence.Step{Lap: "claim"})
	} else {
		list = append(list,
			sequence.Step{Does: "clone the disk", Lap: "disk", Do: m.cloneDisk},
			sequence.Step{Does: "restore memory and devices", Lap: "restore", Then: forkRestored, Do: m.restore},
			assign,
			sequence.Step{Does: "resume the machine", Lap: "resume", Then: forkResumed, Do: m.resume},
			sequence.Step{Does: "connect to the agent", Lap: "connect", Then: forkConnected, Do: m.connect},
		)
	}
	err := sequence.Run(ctx, watch, append(list, []sequence.Step{
		{Does: "reseal the machine", Lap: "reseal", Then: forkResealed, Do: m.reseal},
		{Does: "let the egress process serve the sandbox", Then: forkServed, Do: m.serve},
		{Does: "open the network", Lap: "open", Then: forkOpened, Do: m.open},
		{Does: "sign the report", Lap: "attest", Do: m.attest}, // a fork without a signature is not released
		{Does: "release the workload", Lap: "release", Then: forkReleased, Do: m.release},
		{Does: "record that the sandbox is ready", Lap: "journal", Do: m.ready},
	}...))
	if err != nil && m.claimFailed() {
		err = fmt.Errorf("%w: %w", errClaimFailed, err)
	}
	return m.report, err
}

// errClaimFailed says that a prepared machine was of no use for a child. The child can be made of another machine.
var errClaimFailed = errors.New("the prepared machine could not be claimed")

// claimFailed reports whether a prepared machine failed before it answered anything: it could not be resumed, or it ended. A guest that answered
// has proven something or has failed to; then the child fails as any other.
func (m *restoration) claimFailed() bool {
	if m.claimed == nil || m.report != nil {
		return false
	}
	return !m.asked || m.claimed.ended()
}

func (m *restoration) announce(context.Context) error {
	err := m.s.notes.Announce(journal.Sandbox{Info: m.s.snapshot(), Egress: m.child.Egress, Rules: m.child.Rules})
	if err == nil {
		m.s.egress.SetFirst(m.child.Egress, m.child.Rules)
	}
	return err
}

func (m *restoration) cloneDisk(context.Context) error {
	_, err := sparse.Clone(m.s.overlay, m.ckpt.Overlay)
	return err
}

func (m *restoration) restore(ctx context.Context) error {
	if err := m.s.restore(ctx, m.ckpt); err != nil {
		return err
	}
	return m.s.grow(ctx, m.child)
}

// claim makes a prepared machine one of the sandbox's: it gets its share of the processors, its disk the size that the child wants, and it goes on.
func (m *restoration) claim(ctx context.Context) error {
	m.s.setState(runnerapi.SandboxQuarantined)
	m.agent = m.s.guest
	m.claimed = &preparedMachine{shell: m.s.shell, agent: m.agent}
	if err := m.s.group.SetWeight(m.r.cfg.limits(m.s.shape.resources).Weight); err != nil {
		return err
	}
	if err := m.s.grow(ctx, m.child); err != nil {
		return err
	}
	return m.s.machine.Resume(ctx)
}

func (m *restoration) assign(ctx context.Context) error {
	return m.s.ns.Assign(ctx, m.child.Identity)
}

func (m *restoration) resume(ctx context.Context) error {
	m.s.setState(runnerapi.SandboxQuarantined)
	return m.s.machine.Resume(ctx)
}

func (m *restoration) connect(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, m.r.cfg.GuestTimeout)
	defer cancel()
	if m.agent, err = m.s.agent(ctx); err != nil {
		return vmm.WithConsole(err, m.s.machine)
	}
	return nil
}

func (m *restoration) reseal(ctx context.Context) (err error) {
	m.asked = true
	if m.report, err = m.r.reseal(ctx, m.agent, m.s.shape.diskBytes, m.ckpt, m.child); m.report != nil {
		m.s.silent.Store(false)
	}
	return err
}

func (m *restoration) serve(ctx context.Context) error { return m.s.egress.Serve(ctx) }

func (m *restoration) open(ctx context.Context) error { return m.s.ns.Open(ctx, m.child.Egress) }

func (m *restoration) attest(context.Context) (err error) {
	m.attestation, err = m.r.attest(m.began, m.ckpt, m.child, m.report)
	return err
}

func (m *restoration) release(ctx context.Context) error {
	_, err := m.agent.Release(ctx, guestapi.ReleaseRequest{Generation: m.child.Identity.Generation})
	return err
}

// ready is the last step: a restarted runner adopts a sandbox whose journal says ready, so every other step must be proven before.
func (m *restoration) ready(context.Context) error {
	m.report.Complete = true
	info := m.s.snapshot()
	info.State = runnerapi.SandboxReady
	if err := m.s.notes.Change(func(j *journal.Sandbox) { j.Info, j.Reseal, j.Attestation = info, m.report, m.attestation }); err != nil {
		return err
	}
	m.s.reseal, m.s.attestation = m.report, m.attestation
	m.s.setState(info.State)
	return nil
}
