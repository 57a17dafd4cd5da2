package runner

import (
	"context"
	"errors"

	"github.com/coppice-dev/coppice/core"
)

// A checkpoint is uploaded when all of it is here, and once it was rehearsed, if it is to be. Neither is waited for by the one that uploads: a
// checkpoint that cannot be uploaded yet is put back, and others have their turn.

// errIncomplete is of a checkpoint that is put back. Whatever it lacks calls sealQueue.arrived when it is there.
var errIncomplete = errors.New("the checkpoint is not complete on this host yet")

// lacks is Missing of what the upload of a checkpoint reads: its own images, and the memory of what it will be compared with.
func (r *Runner) lacks(rec *checkpointRecord) (some bool, problem error) {
	ids := rec.imageIDs()
	for id := rec.Parent; id != ""; {
		parent, err := r.checkpoints.get(id)
		if err != nil {
			break
		}
		if r.seals.isSealed(id) {
			ids = append(ids, string(parent.Base))
			break
		}
		id = parent.Parent
	}
	return r.lazy.Missing(ids...)
}

// lateRehearsal reports whether a checkpoint is to be rehearsed before it is uploaded, and sees to it that it will be. The one that uploads goes
// on meanwhile.
func (r *Runner) lateRehearsal(rec *checkpointRecord) bool {
	if !r.wantsRehearsal(rec) {
		return false
	}
	q := r.seals
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.rehearsing { // another: this one's turn comes
		return true
	}
	q.rehearsing = true
	ctx := q.runCtx
	q.beside.Go(func() {
		defer func() {
			if !r.lazy.WorkingSets.Of(rec.Base).Rehearsed { // once is enough, whatever came of it
				r.lazy.WorkingSets.SetRehearsed(rec.Base, nil)
			}
			q.mu.Lock()
			q.rehearsing = false
			q.mu.Unlock()
			q.arrived()
		}()
		ckpt, err := r.checkpoints.open(rec.ID)
		if err != nil { // the upload meets it, too, and says so
			return
		}
		r.rehearse(ctx, ckpt)
		if err := ckpt.close(); err != nil {
			r.cfg.Log.WarnContext(ctx, "checkpoint was not closed after its rehearsal", "checkpoint_id", rec.ID, "err", err)
		}
	})
	return true
}

// reportProblem tells the controller of a checkpoint that cannot be uploaded because an image of it does not come. Keys that the pager lacks may
// come with the answer.
func (r *Runner) reportProblem(ctx context.Context, c Sealing, epoch int64, rec *checkpointRecord, problem error) (attempt int64, err error) {
	begun, err := r.beginSeal(ctx, c, epoch, rec)
	if err != nil {
		return 0, err
	}
	if len(begun.Keys) > 0 && core.CodeOf(problem) == core.CodeKeyUnavailable {
		r.keys.Add(begun.Keys)
		r.lazy.Wake()
	}
	return begun.Attempt, problem
}
