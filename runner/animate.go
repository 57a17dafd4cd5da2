package runner

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/guest"
	"github.com/coppice-dev/coppice/runner/journal"
)

// animation is what happens to a shell until it is a sandbox that is ready.
type animation struct {
	r     *Runner
	s     *sandbox
	ckpt  *checkpoints.Opened
	child runnerapi.Child

	began       time.Time
	agent       *guest.Client
	report      *core.ResealReport // nil until the guest has answered
	attestation []byte
}

// animate gives a shell the state of a checkpoint and an identity of its own: restore, quarantine, reseal, verify, release.
func (r *Runner) animate(ctx context.Context, s *sandbox, ckpt *checkpoints.Opened, child runnerapi.Child, watch *core.Stopwatch) (*core.ResealReport, error) {
	child.Egress = r.egress.OpenedWith(child.Egress)
	a := &animation{r: r, s: s, ckpt: ckpt, child: child, began: time.Now()}
	err := runSteps(ctx, watch, []step{
		{does: "list the sandbox", then: forkListed},
		{does: "announce the sandbox in the journal", then: forkJournaled, do: a.announce},
		{does: "clone the disk", lap: "disk", do: a.cloneDisk},
		{does: "restore memory and devices", lap: "restore", then: forkRestored, do: a.restore},
		{does: "give the namespace its identity", then: forkAssigned, do: a.assign},
		{does: "resume the machine", lap: "resume", then: forkResumed, do: a.resume},
		{does: "connect to the agent", lap: "connect", then: forkConnected, do: a.connect},
		{does: "reseal the machine", lap: "reseal", then: forkResealed, do: a.reseal},
		{does: "let the egress process serve the sandbox", then: forkServed, do: a.serve},
		{does: "open the network", lap: "open", then: forkOpened, do: a.open},
		{does: "sign the report", lap: "attest", do: a.attest}, // a fork without a signature is not released
		{does: "release the workload", lap: "release", then: forkReleased, do: a.release},
		{does: "record that the sandbox is ready", lap: "journal", do: a.ready},
	})
	return a.report, err
}

func (a *animation) announce(context.Context) error {
	err := a.s.notes.Announce(journal.Sandbox{Info: a.s.snapshot(), Egress: a.child.Egress, Rules: a.child.Rules})
	if err == nil {
		a.s.egress.SetFirst(a.child.Egress, a.child.Rules)
	}
	return err
}

func (a *animation) cloneDisk(context.Context) error {
	_, err := sparse.Clone(a.s.overlay, a.ckpt.Overlay)
	return err
}

func (a *animation) restore(ctx context.Context) error { return a.r.restore(ctx, a.s, a.ckpt, a.child) }

func (a *animation) assign(ctx context.Context) error {
	return a.s.ns.Assign(ctx, a.child.Identity)
}

func (a *animation) resume(ctx context.Context) error {
	a.s.setState(runnerapi.SandboxQuarantined)
	return a.s.machine.Resume(ctx)
}

func (a *animation) connect(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, a.r.cfg.GuestTimeout)
	defer cancel()
	if a.agent, err = a.s.agent(ctx); err != nil {
		return withConsole(err, a.s.machine)
	}
	return nil
}

func (a *animation) reseal(ctx context.Context) (err error) {
	a.report, err = a.r.reseal(ctx, a.agent, a.s.shape.diskBytes, a.ckpt, a.child)
	return err
}

func (a *animation) serve(ctx context.Context) error { return a.s.egress.Serve(ctx) }

func (a *animation) open(ctx context.Context) error { return a.s.ns.Open(ctx, a.child.Egress) }

func (a *animation) attest(context.Context) (err error) {
	a.attestation, err = a.r.attest(a.began, a.ckpt, a.child, a.report)
	return err
}

func (a *animation) release(ctx context.Context) error {
	_, err := a.agent.Release(ctx, guestapi.ReleaseRequest{Generation: a.child.Identity.Generation})
	return err
}

// ready is the last step: a restarted runner adopts a sandbox whose journal says ready, so every other step must be proven before.
func (a *animation) ready(context.Context) error {
	a.report.Complete = true
	info := a.s.snapshot()
	info.State = runnerapi.SandboxReady
	if err := a.s.notes.Change(func(j *journal.Sandbox) { j.Info, j.Reseal, j.Attestation = info, a.report, a.attestation }); err != nil {
		return err
	}
	a.s.reseal, a.s.attestation = a.report, a.attestation
	a.s.setState(info.State)
	return nil
}
