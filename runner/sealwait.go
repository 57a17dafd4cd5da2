package runner

import (
	"context"
	"errors"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/checkpoints"
)

// A checkpoint is uploaded when it is complete on this host, and after its rehearsal, if it needs one. The uploader waits for neither: it puts
// back a checkpoint that cannot be uploaded yet, and continues with others.

// errIncomplete is the error of a checkpoint that is put back. When the missing part arrives, sealQueue.arrived is called.
var errIncomplete = errors.New("the checkpoint is not complete on this host yet")

// lacks is Missing for the images that the upload of a checkpoint reads: its own images, and the memory of its reference.
func (r *Runner) lacks(rec *checkpoints.Record) (some bool, problem error) {
	ids := rec.ImageIDs()
	for id := rec.Parent; id != ""; {
		parent, err := r.checkpoints.Get(id)
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

// lateRehearsal reports whether a checkpoint must be rehearsed before it is uploaded. If so, it starts the rehearsal. The uploader continues
// with others meanwhile.
func (r *Runner) lateRehearsal(rec *checkpoints.Record) bool {
	if !r.wantsRehearsal(rec) {
		return false
	}
	q := r.seals
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.rehearsing { // another checkpoint is being rehearsed; this one is next or later
		return true
	}
	q.rehearsing = true
	ctx := q.runCtx
	q.beside.Go(func() {
		defer func() {
			if !r.lazy.WorkingSets.Of(rec.Base).Rehearsed { // once is enough, whatever the result was
				r.lazy.WorkingSets.SetRehearsed(rec.Base, nil)
			}
			q.mu.Lock()
			q.rehearsing = false
			q.mu.Unlock()
			q.arrived()
		}()
		ckpt, err := r.checkpoints.Open(rec.ID)
		if err != nil { // the upload will get the same error and report it
			return
		}
		r.rehearse(ctx, ckpt)
		if err := ckpt.Close(); err != nil {
			r.cfg.Log.WarnContext(ctx, "checkpoint was not closed after its rehearsal", "checkpoint_id", rec.ID, "err", err)
		}
	})
	return true
}

// reportProblem tells the controller of a checkpoint that cannot be uploaded because one of its images does not arrive. The answer may have keys
// that the pager lacks.
func (r *Runner) reportProblem(ctx context.Context, c Sealing, epoch int64, rec *checkpoints.Record, problem error) (attempt int64, err error) {
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
