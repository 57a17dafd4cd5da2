package heartbeat

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/api/runnerapi/beats"
	"github.com/coppice-dev/coppice/core"
)

// beat registers if there is no lease, sends one heartbeat, and says when the next is due.
func (l *Link) beat(ctx context.Context) (time.Duration, error) {
	if l.lease == nil {
		if err := l.register(ctx); err != nil {
			return 0, err
		}
	}
	var sent beats.Message
	var out runnerapi.Heartbeated
	var began time.Time
	var answered func(time.Duration) error
	err := l.attempt(ctx, func(base string) (err error) {
		// What the last controller was told may be old by now: each attempt collects the report again and has its own number.
		if sent, err = l.collect(); err != nil {
			return err
		}
		answered, began, out = l.runner.Lease().Attempt(), time.Now(), runnerapi.Heartbeated{}
		path, body := runnerapi.PathHeartbeat, any(sent.Whole)
		if sent.Differences != nil {
			path, body = runnerapi.PathBeats, sent.Differences
		}
		if err = post(ctx, l.client, base+strings.Replace(path, "{id}", string(l.runner.ID()), 1), l.cfg.Secret, body, &out); err != nil {
			l.sender.Unanswered()
		}
		return err
	})
	if core.CodeOf(err) == core.CodeRunnerLost { // given up: whatever runs here may have been replaced
		l.endLease()
		return 0, errors.Join(err, l.runner.Fence(ctx, core.MessageOf(err)))
	}
	if c := core.CategoryOf(err); c == core.Conflict || c == core.NotFound {
		l.endLease() // the database does not have this lease: register again
		return 0, err
	}
	if err != nil {
		return 0, err
	}
	again := l.sender.Answered(sent, out)
	if err := answered(seconds(out.FenceSeconds)); err != nil {
		return 0, err
	}
	if l.cfg.Peers != nil {
		l.cfg.Peers.Learn(out.RemovedRunners, began, seconds(out.TTLSeconds))
	}
	l.obey(ctx, sent.Whole, out)
	l.certify(ctx, l.lease.ClusterID, out.AttestationCertificate)
	if again {
		return 0, nil
	}
	return seconds(out.TTLSeconds / 3), nil
}

// register gets a new lease.
func (l *Link) register(ctx context.Context) error {
	info, err := l.runner.Info()
	if err != nil {
		return err
	}
	var out runnerapi.Registered
	in := runnerapi.Register{Info: info, Endpoint: l.cfg.Endpoint, DataURL: l.cfg.DataURL, OwnDataCert: l.cfg.OwnDataCert, LeaseEpoch: l.runner.Lease().LastEpoch()}
	if in.AttestationRequest, err = l.runner.Attestor().Request(); err != nil {
		return err
	}
	answered := l.runner.Lease().Attempt()
	if err := l.post(ctx, runnerapi.PathRegister, in, &out); err != nil {
		return err
	}
	l.certify(ctx, out.ClusterID, out.AttestationCertificate)
	if err := l.runner.Lease().KeepEpoch(out.LeaseEpoch); err != nil { // the lease is not used then: nothing would beat for it
		return err
	}
	if err := answered(seconds(out.FenceSeconds)); err != nil {
		return err
	}
	l.lease = &out
	l.sender.Registered(out.LeaseEpoch)
	l.epoch.Store(out.LeaseEpoch)
	l.once.Do(func() { close(l.registered) })
	if l.cfg.Passes != nil {
		l.cfg.Passes.Learn(out.PassKeys)
	}
	l.cfg.Log.InfoContext(ctx, "runner registered", "runner_id", info.RunnerID, "lease_epoch", out.LeaseEpoch)
	return nil
}

func (l *Link) endLease() {
	l.lease = nil
	l.epoch.Store(0)
}

// collect makes the next heartbeat.
func (l *Link) collect() (beats.Message, error) {
	beat := l.sender.Begin()
	var err error
	if beat.Info, err = l.runner.Info(); err != nil {
		return beats.Message{}, err
	}
	beat.Sandboxes, beat.Usage, beat.Fetching = l.runner.Sandboxes(), l.runner.Usages(), l.runner.Fetching()
	for _, c := range l.runner.Checkpoints() {
		beat.Checkpoints = append(beat.Checkpoints, c.ID)
	}
	if l.cfg.Plane != nil {
		for _, id := range l.cfg.Plane.Used() {
			l.used[id] = true
		}
		for _, s := range beat.Sandboxes {
			if l.used[s.WorkspaceID] {
				beat.DataUsed = append(beat.DataUsed, s.WorkspaceID)
			}
		}
		beat.DataKeys = l.cfg.Plane.Keys()
		beat.DataLog, beat.DataWrites = l.cfg.Plane.Writes()
	}
	beat.AttestationRequest, err = l.runner.Attestor().Renewal(time.Now())
	return l.sender.Make(beat), err
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// obey forgets what was reported and drops what the controller has no row for.
func (l *Link) obey(ctx context.Context, sent runnerapi.Heartbeat, out runnerapi.Heartbeated) {
	if l.cfg.Plane != nil {
		l.cfg.Plane.End(out.EndedKeys)
		if taken := runnerapi.TakenWrites(sent.DataWrites, out); len(taken) > 0 {
			if err := l.cfg.Plane.Recorded(taken[len(taken)-1].Number); err != nil {
				l.cfg.Log.WarnContext(ctx, "the log of writes by pass was not made shorter; it is tried again with the next of them", "err", err)
			}
		}
		clear(l.used)
	}
	l.runner.Drain(out.Draining)
	l.runner.ForgetUsages(sent.Usage)
	for _, s := range sent.Sandboxes {
		if s.State == runnerapi.SandboxDead && !out.AllSandboxes { // else it may be that the differences were not applied
			l.runner.Forget(s.ID)
		}
	}
	for _, id := range out.DropSandboxes {
		l.cfg.Log.WarnContext(ctx, "sandbox without a row is destroyed", "sandbox_id", id)
		if err := l.runner.Destroy(ctx, id); err != nil {
			l.cfg.Log.ErrorContext(ctx, "sandbox was not destroyed", "sandbox_id", id, "err", err)
		}
	}
	strays, deleted := out.StrayCheckpoints, out.DropCheckpoints
	if out.Number == 0 { // a controller of an older version does not tell one from the other
		strays, deleted = deleted, nil
	}
	for _, id := range strays {
		l.cfg.Log.WarnContext(ctx, "checkpoint without a row goes to the trash", "checkpoint_id", id)
		if err := l.runner.Discard(id); err != nil {
			l.cfg.Log.ErrorContext(ctx, "checkpoint without a row is not in the trash", "checkpoint_id", id, "err", err)
		}
	}
	for _, id := range deleted {
		l.cfg.Log.InfoContext(ctx, "deleted checkpoint is removed", "checkpoint_id", id)
		if err := l.runner.DeleteCheckpoint(id); err != nil {
			l.cfg.Log.ErrorContext(ctx, "checkpoint was not deleted", "checkpoint_id", id, "err", err)
		}
	}
}
