package sealing

import (
	"context"
	"errors"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/checkpoints"
)

// A checkpoint is uploaded when it is complete on this host, and after its rehearsal, if it needs one. The uploader waits for neither: it puts
// back a checkpoint that cannot be uploaded yet, and continues with others.

// errIncomplete is the error of a checkpoint that is put back. When the missing part arrives, queue.arrived is called.
var errIncomplete = errors.New("the checkpoint is not complete on this host yet")

// lacks is Missing for the images that the upload of a checkpoint reads: its own images, and the memory of its reference.
func (s *Sealer) lacks(rec *checkpoints.Record) (some bool, problem error) {
	ids := rec.ImageIDs()
	for id := rec.Parent; id != ""; {
		parent, err := s.cfg.Checkpoints.Get(id)
		if err != nil {
			break
		}
		if s.queue.isSealed(id) {
			ids = append(ids, string(parent.Base))
			break
		}
		id = parent.Parent
	}
	return s.cfg.Incomplete.Missing(ids...)
}

// lateRehearsal reports whether a checkpoint must be rehearsed before it is uploaded. If so, it starts the rehearsal. The uploader continues
// with others meanwhile.
func (s *Sealer) lateRehearsal(rec *checkpoints.Record) bool {
	if !s.cfg.Rehearsals.Wanted(rec) {
		return false
	}
	q := s.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.rehearsing { // another checkpoint is being rehearsed; this one is next or later
		return true
	}
	q.rehearsing = true
	ctx := q.runCtx
	q.beside.Go(func() {
		defer func() {
			if !s.cfg.WorkingSets.Of(rec.Base).Rehearsed { // once is enough, whatever the result was
				s.cfg.WorkingSets.SetRehearsed(rec.Base, nil)
			}
			q.mu.Lock()
			q.rehearsing = false
			q.mu.Unlock()
			q.arrived()
		}()
		ckpt, err := s.cfg.Checkpoints.Open(rec.ID)
		if err != nil { // the upload will get the same error and report it
			return
		}
		s.cfg.Rehearsals.Rehearse(ctx, ckpt)
		if err := ckpt.Close(); err != nil {
			s.cfg.Log.WarnContext(ctx, "checkpoint was not closed after its rehearsal", "checkpoint_id", rec.ID, "err", err)
		}
	})
	return true
}

// reportProblem tells the controller of a checkpoint that cannot be uploaded because one of its images does not arrive. The answer may have keys
// that the pager lacks.
func (s *Sealer) reportProblem(ctx context.Context, c Controller, epoch int64, rec *checkpoints.Record, problem error) (attempt int64, err error) {
	begun, err := s.begin(ctx, c, epoch, rec)
	if err != nil {
		return 0, err
	}
	if len(begun.Keys) > 0 && core.CodeOf(problem) == core.CodeKeyUnavailable {
		s.cfg.Keys.Add(begun.Keys)
		s.cfg.Incomplete.Wake()
	}
	return begun.Attempt, problem
}
