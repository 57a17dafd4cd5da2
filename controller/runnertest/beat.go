package runnertest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/api/runnerapi/beats"
	"github.com/coppice-dev/coppice/core"
)

// NextBeat collects a heartbeat with all that the fake holds, and gives it the next number of the lease.
func (r *Runner) NextBeat(epoch int64) runnerapi.Heartbeat {
	beat := r.nextBeat(epoch)
	slices.Sort(beat.Checkpoints)
	return beat
}

// nextBeat is NextBeat with the checkpoints in any order.
func (r *Runner) nextBeat(epoch int64) runnerapi.Heartbeat {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.epoch != epoch {
		r.epoch = epoch
		r.sender.Registered(epoch)
	}
	beat := r.sender.Begin()
	beat.Info, beat.Checkpoints = r.info(), slices.AppendSeq(make([]core.CheckpointID, 0, len(r.checkpoints)), maps.Keys(r.checkpoints))
	for _, id := range slices.Sorted(maps.Keys(r.sandboxes)) {
		beat.Sandboxes = append(beat.Sandboxes, r.sandboxes[id].Sandbox)
	}
	return beat
}

// Register announces the fake to a controller whose listener for runners is at base.
func (r *Runner) Register(ctx context.Context, base, secret string) error {
	r.mu.Lock()
	reg := runnerapi.Register{Info: r.info(), Endpoint: "http://" + r.address}
	r.mu.Unlock()
	var err error
	if reg.AttestationRequest, err = r.AttestationRequest(); err != nil {
		return err
	}
	var out runnerapi.Registered
	if err := r.post(ctx, base+runnerapi.PathRegister, secret, reg, &out); err != nil {
		return err
	}
	if err := r.Certify(out.ClusterID, out.AttestationCertificate); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lease = &out
	return nil
}

// Beat sends one heartbeat and obeys the answer.
func (r *Runner) Beat(ctx context.Context, base, secret string) (runnerapi.Heartbeated, error) {
	r.mu.Lock()
	if r.lease == nil {
		r.mu.Unlock()
		return runnerapi.Heartbeated{}, errors.New("a heartbeat before the registration")
	}
	epoch := r.lease.LeaseEpoch
	r.mu.Unlock()
	beat := r.NextBeat(epoch)
	var out runnerapi.Heartbeated
	path := strings.Replace(runnerapi.PathHeartbeat, "{id}", string(r.cfg.ID), 1)
	if err := r.post(ctx, base+path, secret, beat, &out); err != nil {
		return out, err
	}
	r.Obey(beat, out)
	return out, nil
}

// Obey forgets the dead that a heartbeat has reported and drops what its answer says.
func (r *Runner) Obey(beat runnerapi.Heartbeat, out runnerapi.Heartbeated) {
	r.obey(beats.Message{Whole: beat}, out)
}

// obey does it, and says whether the controller wants the whole list at once.
func (r *Runner) obey(sent beats.Message, out runnerapi.Heartbeated) (again bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	beat := sent.Whole
	if beat.LeaseEpoch == r.epoch {
		again = r.sender.Answered(sent, out)
	}
	for _, s := range beat.Sandboxes {
		if s.State == runnerapi.SandboxDead && !out.AllSandboxes {
			r.remove(s.ID)
		}
	}
	for _, id := range out.DropSandboxes {
		r.remove(id)
	}
	for _, id := range append(out.DropCheckpoints, out.StrayCheckpoints...) {
		delete(r.checkpoints, id)
	}
	return again
}

// Run registers and heartbeats until the context ends.
func (r *Runner) Run(ctx context.Context, base, secret string) {
	registered := false
	for ctx.Err() == nil {
		wait := 200 * time.Millisecond
		if !registered {
			registered = r.Register(ctx, base, secret) == nil
		} else if out, err := r.Beat(ctx, base, secret); err == nil {
			wait = time.Duration(out.TTLSeconds / 3 * float64(time.Second))
		} else if c := core.CategoryOf(err); c == core.Conflict || c == core.NotFound {
			registered = false
		}
		_ = sleep(ctx, wait) // the loop ends by its condition
	}
}

// Post sends a message as a runner does.
func Post(ctx context.Context, url, secret string, in, out any) error {
	return post(ctx, http.DefaultClient, url, secret, in, out)
}

// post is Post by the fake's own client.
func (r *Runner) post(ctx context.Context, url, secret string, in, out any) error {
	return post(ctx, cmp.Or(r.cfg.Client, http.DefaultClient), url, secret, in, out)
}

func post(ctx context.Context, client *http.Client, url, secret string, in, out any) error {
	b, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(string(b)))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+secret)
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode == http.StatusNoContent {
		return nil
	}
	if res.StatusCode < 300 {
		return json.NewDecoder(res.Body).Decode(out)
	}
	var p runnerapi.Problem
	if err := json.NewDecoder(res.Body).Decode(&p); err != nil {
		return fmt.Errorf("status %d: %w", res.StatusCode, err)
	}
	return p.Err()
}
