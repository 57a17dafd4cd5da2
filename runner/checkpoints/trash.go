package checkpoints

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/bootclock"
	"github.com/coppice-dev/coppice/runner/trash"
)

// The trash has checkpoints that the database does not know. A failover may have lost their rows, so their bytes stay for a time.
// docs/adr/0044-heartbeats.md

// The bounds of the trash. The time starts again when a runner starts.
const (
	trashGrace = time.Hour
	maxTrash   = 4096
)

// Trashed is a checkpoint in the trash.
type Trashed struct {
	Record *Record
	Until  time.Duration // by bootclock
}

// Discard moves a checkpoint that the database does not know to the trash. Forks that have it open are not disturbed. It is no error if there
// is no such checkpoint.
func (s *Store) Discard(id core.CheckpointID) error {
	s.cfg.Forgotten(id)
	if err := s.discard(id, trashGrace); err != nil {
		return fmt.Errorf("move checkpoint %s to the trash: %w", id, err)
	}
	return nil
}

// discard moves a checkpoint to the trash. It replaces one of the same id there.
func (s *Store) discard(id core.CheckpointID, grace time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	rec, there := s.records[id]
	if !there {
		return nil
	}
	from, to := filepath.Join(s.dir, string(id)), trash.Path(s.trashDir, id)
	if _, err := os.Lstat(filepath.Join(from, RecordFile)); err != nil {
		return err
	}
	kept := trash.Kept(s.trashDir, id) || trash.Marked(s.trashPart(id))
	if err := trash.Unmark(from); err != nil {
		return err
	}
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	done, err := move(from, to)
	if !done {
		return err
	}
	delete(s.records, id)
	delete(s.used, id)
	s.trash[id] = Trashed{rec, bootclock.Now() + grace}
	if kept {
		err = errors.Join(err, trash.Keep(s.trashDir, id))
	}
	return err
}

// move renames a directory. After the rename, the state in memory must change too, even if the rename could not be made durable: otherwise the
// next call would look for the old name.
func move(from, to string) (done bool, err error) {
	if err := os.Rename(from, to); err != nil {
		return false, err
	}
	return true, errors.Join(atomicfile.SyncDir(filepath.Dir(to)), atomicfile.SyncDir(filepath.Dir(from)))
}

// trashPart is the path of a checkpoint of the trash while it is removed.
func (s *Store) trashPart(id core.CheckpointID) string {
	return filepath.Join(s.trashDir, PartPrefix+string(id))
}

// trashPlace is the path of a checkpoint of the trash. A removal that failed may have moved it; it is still complete then, because its bytes
// are removed only after it has left the list. If it is in neither place, the error says that the file is absent.
func (s *Store) trashPlace(id core.CheckpointID) (string, error) {
	path := trash.Path(s.trashDir, id)
	if _, err := os.Lstat(path); ignoreAbsent(err) != nil || err == nil {
		return path, err
	}
	path = s.trashPart(id)
	_, err := os.Lstat(path)
	return path, err
}

// Find is Get for a request that names a checkpoint: if the checkpoint is in the trash, Find takes it back.
func (s *Store) Find(id core.CheckpointID) (*Record, error) {
	if rec, err := s.Get(id); err == nil {
		return rec, nil
	}
	rec, err := s.takeBack(id)
	if rec != nil || err != nil {
		return rec, err
	}
	return s.Get(id)
}

// takeBack returns nil if the checkpoint is not in the trash.
func (s *Store) takeBack(id core.CheckpointID) (*Record, error) {
	s.mu.Lock()
	t, there := s.trash[id]
	if !there {
		s.mu.Unlock()
		return nil, nil //nolint:nilnil // see above
	}
	from, err := s.trashPlace(id)
	if errors.Is(err, os.ErrNotExist) { // somebody has removed the files
		delete(s.trash, id)
		s.mu.Unlock()
		return nil, nil //nolint:nilnil // likewise
	}
	if err == nil {
		var done bool
		to := filepath.Join(s.dir, string(id))
		if done, err = move(from, to); done {
			_ = trash.Unmark(to) // else discard does it
			delete(s.trash, id)
			s.records[id], s.used[id] = t.Record, time.Now()
		}
	}
	s.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("take checkpoint %s back from the trash: %w", id, err)
	}
	s.cfg.Published()
	return t.Record, nil
}

// readTrash reads what an earlier process has left in the trash. It removes directories without a valid record, because nothing can use
// them, unless an operator keeps them. If a record cannot be read now, it may still be valid. Then the runner does not start, because it
// does not know which memory the checkpoint needs.
func (s *Store) readTrash() error {
	entries, err := os.ReadDir(s.trashDir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if id, part := strings.CutPrefix(e.Name(), PartPrefix); part { // an unfinished removal
			path := filepath.Join(s.trashDir, e.Name())
			if !trash.Marked(path) {
				err = os.RemoveAll(path)
			} else if err = atomicfile.Rename(path, trash.Path(s.trashDir, core.CheckpointID(id))); err == nil {
				return s.readTrash() // with it
			}
			if err != nil {
				return err
			}
			continue
		}
		rec, err := readRecord(filepath.Join(s.trashDir, e.Name()))
		switch {
		case err != nil:
			return fmt.Errorf("read the record of checkpoint %s in the trash: %w; check the disk, or remove %s if the checkpoint is not needed",
				core.Clip(e.Name()), err, filepath.Join(s.trashDir, e.Name()))
		case rec != nil && string(rec.ID) == e.Name():
			s.trash[rec.ID] = Trashed{rec, bootclock.Now() + trashGrace}
		case !trash.Kept(s.trashDir, core.CheckpointID(e.Name())):
			if err := os.RemoveAll(filepath.Join(s.trashDir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// readRecord returns nil if there is no record, or an invalid one.
func readRecord(dir string) (*Record, error) {
	b, err := os.ReadFile(filepath.Join(dir, RecordFile))
	if err != nil {
		return nil, ignoreAbsent(err)
	}
	rec := new(Record)
	if invalid := json.Unmarshal(b, rec); invalid != nil {
		rec = nil
	}
	return rec, nil
}

// ListTrash lists the trash, the oldest first.
func (s *Store) ListTrash() []Trashed {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Trashed, 0, len(s.trash))
	for _, t := range s.trash {
		out = append(out, t)
	}
	slices.SortFunc(out, func(a, b Trashed) int {
		return cmp.Or(cmp.Compare(a.Until, b.Until), cmp.Compare(a.Record.ID, b.Record.ID))
	})
	return out
}

// removeTrash removes a checkpoint from the trash, unless it was taken back meanwhile. It removes one that an operator keeps only if the
// caller allows this.
func (s *Store) removeTrash(id core.CheckpointID, kept bool) (gone bool, err error) {
	if gone, err = s.takeOut(id, kept); !gone || err != nil {
		return false, err
	}
	return true, errors.Join(os.RemoveAll(s.trashPart(id)), s.Collect())
}

// takeOut moves a checkpoint out of the trash. It reads the operator's mark when nobody can set it any more. If the checkpoint is removed
// although it has the mark, it loses the mark: if the runner dies while it removes the files, the rest of them must not come back.
func (s *Store) takeOut(id core.CheckpointID, kept bool) (gone bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, there := s.trash[id]; !there {
		return false, nil
	}
	path, part := trash.Path(s.trashDir, id), s.trashPart(id)
	place, err := s.trashPlace(id)
	if errors.Is(err, os.ErrNotExist) { // somebody has removed the files
		delete(s.trash, id)
		return true, nil
	}
	if err != nil {
		return false, err
	}
	if place == path {
		if err := os.RemoveAll(part); err != nil {
			return false, err
		}
		if err := atomicfile.Rename(path, part); err != nil {
			return false, err
		}
	}
	switch {
	case kept:
		if err := errors.Join(trash.Unmark(part), atomicfile.SyncDir(part)); err != nil {
			return false, err
		}
	case trash.Marked(part):
		return false, atomicfile.Rename(part, path)
	}
	delete(s.trash, id)
	return true, nil
}

// EmptyTrash removes checkpoints that are in the trash for too long, those beyond the largest number, and, while the disk is nearly full, the
// oldest ones. free says how many bytes of the disk may be written.
func (s *Store) EmptyTrash(ctx context.Context, free func() (int64, error)) error {
	list := s.ListTrash()
	var errs []error
	for i, t := range list {
		left, err := free()
		if err != nil {
			errs = append(errs, err)
			break
		}
		if t.Until > bootclock.Now() && left > 0 && len(list)-i <= maxTrash {
			break // the others are younger
		}
		if _, err := s.Drop(ctx, t.Record.ID); err != nil { // it may be the only one that cannot be removed
			errs = append(errs, fmt.Errorf("checkpoint %s: %w", t.Record.ID, err))
		}
	}
	return errors.Join(errs...)
}

// DropOldest removes the oldest checkpoint from the trash. It returns false if the trash has none that may be removed.
func (s *Store) DropOldest(ctx context.Context) (bool, error) {
	var errs []error
	for _, t := range s.ListTrash() {
		gone, err := s.Drop(ctx, t.Record.ID)
		if gone {
			return true, err
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("checkpoint %s: %w", t.Record.ID, err))
		}
	}
	return false, errors.Join(errs...)
}

// Drop removes a checkpoint from the trash, unless an operator wants it kept.
func (s *Store) Drop(ctx context.Context, id core.CheckpointID) (gone bool, err error) {
	if trash.Kept(s.trashDir, id) {
		return false, nil
	}
	if err := trashJudged.Hit(ctx); err != nil {
		return false, err
	}
	if gone, err = s.removeTrash(id, false); !gone {
		return false, err
	}
	s.cfg.Log.WarnContext(ctx, "checkpoint without a row was removed from the trash", "checkpoint_id", id)
	return true, errors.Join(err, s.cfg.Removed())
}
