package runnertest

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/fakeguest"
)

// Adopt has the fake hold sandboxes and checkpoints that it did not make, as the rows say that it does. All are like one
// checkpoint, which it holds or another fake does. Their guests are empty.
func (r *Runner) Adopt(like runnerapi.Checkpoint, sandboxes []runnerapi.Sandbox, ids []core.CheckpointID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	shared := fakeguest.NewState() // nobody writes to the guest of a checkpoint
	for _, id := range ids {
		cp := &checkpoint{Checkpoint: like, guest: shared}
		cp.ID, cp.Parent = id, "" // the rows know its parent
		r.checkpoints[id] = cp
	}
	for _, s := range sandboxes {
		r.sandboxes[s.ID] = &sandbox{Sandbox: s, guest: fakeguest.New(fakeguest.InProcess(fakeguest.NewState()), nil), image: like.Image, ports: map[core.PortID]runnerapi.Port{}}
	}
}

// Beaten is what became of a heartbeat.
type Beaten struct {
	Whole bool          // it named everything
	Next  time.Duration // until the next is due
}

// BeatDifferences sends one heartbeat as a runner does: with what the controllers do not know yet, and with what each sandbox uses.
func (r *Runner) BeatDifferences(ctx context.Context, base, secret string) (Beaten, error) {
	r.mu.Lock()
	if r.lease == nil {
		r.mu.Unlock()
		return Beaten{}, errors.New("a heartbeat before the registration")
	}
	epoch := r.lease.LeaseEpoch
	r.mu.Unlock()
	whole := r.nextBeat(epoch)
	r.mu.Lock()
	ended := len(r.ended)
	whole.Usage = append(whole.Usage, r.ended...)
	for _, s := range whole.Sandboxes {
		whole.Usage = append(whole.Usage, r.usage(&sandbox{Sandbox: s}, false))
	}
	sent := r.sender.Make(whole)
	r.mu.Unlock()
	path, body := runnerapi.PathHeartbeat, any(sent.Whole)
	if sent.Differences != nil {
		path, body = runnerapi.PathBeats, sent.Differences
	}
	out := Beaten{Whole: sent.Differences == nil}
	var answer runnerapi.Heartbeated
	if err := r.post(ctx, base+strings.Replace(path, "{id}", string(r.cfg.ID), 1), secret, body, &answer); err != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.sender.Unanswered()
		return out, err
	}
	again := r.obey(sent, answer)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = r.ended[ended:]
	if !again {
		out.Next = time.Duration(answer.TTLSeconds / 3 * float64(time.Second))
	}
	return out, nil
}

// usage is what an idle sandbox might have used by now.
func (r *Runner) usage(s *sandbox, ended bool) runnerapi.Usage {
	age := time.Since(s.StartedAt).Seconds()
	return runnerapi.Usage{SandboxID: s.ID, CPUSeconds: age / 50, SentBytes: int64(age * 100), ReceivedBytes: int64(age * 200), Ended: ended}
}
