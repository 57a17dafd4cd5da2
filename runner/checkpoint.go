package runner

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/roots"
	"github.com/coppice-dev/coppice/runner/trash"
)

// The files of a checkpoint.
const (
	recordFile  = "checkpoint.json"
	stateFile   = "device.state"
	deltaFile   = "memory.delta"
	overlayFile = "overlay.ext4"
	surveyFile  = "survey.json"
)

// checkpointStore keeps the checkpoints of this host. It decides which bases are still needed.
type checkpointStore struct {
	dir      string
	trashDir string // on the same file system
	bases    *memory.BaseStore
	// published is called when there is a new checkpoint.
	published func()

	mu      sync.Mutex // guards what follows
	records map[core.CheckpointID]*checkpointRecord
	making  int                 // number of bases that are being made and that no record names yet: no base is collected meanwhile
	lent    map[core.BaseID]int // users of a base besides checkpoints: sandboxes and shells
	held    map[core.CheckpointID]int
	used    map[core.CheckpointID]time.Time // when each checkpoint was opened last
	freed   chan struct{}                   // closed when one of held is gone; nil: nobody waits
	trash   map[core.CheckpointID]trashed
}

// checkpointRecord is immutable once it is published; a rebase publishes another one.
type checkpointRecord struct {
	runnerapi.Checkpoint

	// Rebased says that a rebase has replaced base and delta: Base names the new base, and there is no delta file.
	Rebased bool `json:"rebased,omitempty"`
	// Fetched says that the checkpoint was not captured here, so it can be fetched again.
	Fetched bool `json:"fetched,omitempty"`
	// Project is the project of a fetched checkpoint.
	Project core.ProjectID `json:"project_id,omitempty"`
	// Root is the root file system of its guest. It is empty if this is the one of an image of this host.
	Root roots.Key `json:"root_file,omitempty"`
	// WorkingSet is that of runnerapi.StoredRecord.
	WorkingSet []byte `json:"working_set,omitempty"`
}

// hasDelta reports whether the memory is a base and a delta.
func (r *checkpointRecord) hasDelta() bool { return r.DeltaBytes > 0 && !r.Rebased }

// rootKey is the key of the root file system of a checkpoint's guest.
func (r *checkpointRecord) rootKey() roots.Key { return cmp.Or(r.Root, roots.Own(r.Image)) }

const partPrefix = ".part-"

// openCheckpointStore opens the store and removes what nothing needs. Each base in lent has a sandbox, which gives the base back when it ends.
func openCheckpointStore(dataDir string, bases *memory.BaseStore, lent []core.BaseID) (*checkpointStore, error) {
	dir, trashDir := filepath.Join(dataDir, "checkpoints"), trash.Dir(dataDir)
	for _, d := range []string{dir, trashDir} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	if err := atomicfile.SyncDir(dataDir); err != nil {
		return nil, err
	}
	s := &checkpointStore{dir: dir, trashDir: trashDir, bases: bases, records: make(map[core.CheckpointID]*checkpointRecord), lent: make(map[core.BaseID]int), held: make(map[core.CheckpointID]int), used: make(map[core.CheckpointID]time.Time), trash: make(map[core.CheckpointID]trashed)}
	for _, id := range lent {
		s.lent[id]++
	}
	if err := s.readTrash(); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), partPrefix) { // an unfinished capture or removal of an earlier process
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return nil, err
			}
			continue
		}
		b, err := os.ReadFile(filepath.Join(dir, e.Name(), recordFile))
		if err != nil {
			return nil, err
		}
		rec := new(checkpointRecord)
		if err := json.Unmarshal(b, rec); err != nil || string(rec.ID) != e.Name() {
			return nil, core.Wrapf(err, core.DataLoss, core.CodeCheckpointCorrupt, "the record of checkpoint %s on this host is damaged", core.Clip(e.Name()))
		}
		if rec.Rebased { // a crash between the record and the removal leaves the delta that the base replaced
			if err := ignoreAbsent(os.Remove(s.path(rec.ID, deltaFile))); err != nil {
				return nil, err
			}
		}
		s.records[rec.ID] = rec
	}
	return s, s.collect()
}

// collect removes bases that nothing names.
func (s *checkpointStore) collect() error {
	ids, err := s.bases.List()
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.making > 0 {
		return nil
	}
	wanted := make(map[core.BaseID]bool)
	for _, r := range s.records {
		wanted[r.Base] = true
	}
	for _, t := range s.trash {
		wanted[t.rec.Base] = true
	}
	var errs []error
	for _, id := range ids {
		if !wanted[id] && s.lent[id] == 0 {
			errs = append(errs, s.bases.Remove(id))
		}
	}
	return errors.Join(errs...)
}

// holdBases keeps every base on disk until release is called: a base is published before the record that names it.
func (s *checkpointStore) holdBases() (release func() error) {
	s.mu.Lock()
	s.making++
	s.mu.Unlock()
	return func() error {
		s.mu.Lock()
		s.making--
		s.mu.Unlock()
		return s.collect()
	}
}

// lend keeps a base on disk for a sandbox until giveBack: later captures of that sandbox will name the base.
func (s *checkpointStore) lend(id core.BaseID) {
	s.mu.Lock()
	s.lent[id]++
	s.mu.Unlock()
}

func (s *checkpointStore) giveBack(id core.BaseID) error {
	s.mu.Lock()
	s.lent[id]--
	last := s.lent[id] == 0
	if last {
		delete(s.lent, id)
	}
	s.mu.Unlock()
	if !last {
		return nil
	}
	return s.collect()
}

func (s *checkpointStore) get(id core.CheckpointID) (*checkpointRecord, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r, ok := s.records[id]; ok {
		return r, nil
	}
	return nil, core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "checkpoint %s is not on this runner", id)
}

func (s *checkpointStore) list() []*checkpointRecord {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*checkpointRecord, 0, len(s.records))
	for _, r := range s.records {
		out = append(out, r)
	}
	return out
}

func (s *checkpointStore) path(id core.CheckpointID, file string) string {
	return filepath.Join(s.dir, string(id), file)
}

// begin makes the directory that a capture writes into.
func (s *checkpointStore) begin(id core.CheckpointID) (dir string, err error) {
	dir = filepath.Join(s.dir, partPrefix+string(id))
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	return dir, os.Mkdir(dir, 0o700)
}

// publish makes a written directory the checkpoint: first durable, then visible.
func (s *checkpointStore) publish(dir string, rec *checkpointRecord) error {
	if err := atomicfile.WriteJSON(filepath.Join(dir, recordFile), rec, 0o600); err != nil {
		return err
	}
	if err := atomicfile.Rename(dir, filepath.Join(s.dir, string(rec.ID))); err != nil {
		return err
	}
	s.mu.Lock()
	s.records[rec.ID], s.used[rec.ID] = rec, time.Now()
	s.mu.Unlock()
	if s.published != nil {
		s.published()
	}
	return nil
}

// replace publishes a record that names another base with the same bytes, and removes the delta. Forks that have the old delta
// open keep it.
func (s *checkpointStore) replace(ctx context.Context, rec *checkpointRecord) error {
	if err := s.replaceRecord(ctx, rec); err != nil {
		return err
	}
	return s.collect()
}

// replaceRecord holds the lock throughout: the checkpoint may be discarded, and taken back, at any time.
func (s *checkpointStore) replaceRecord(ctx context.Context, rec *checkpointRecord) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, there := s.records[rec.ID]
	if !there {
		return core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "checkpoint %s was removed", rec.ID)
	}
	err := atomicfile.WriteJSON(s.path(rec.ID, recordFile), rec, 0o600)
	if err == nil {
		err = rebaseWritten.Hit(ctx)
	}
	if err != nil {
		return errors.Join(err, s.restoreRecord(old, rec.Base))
	}
	s.records[rec.ID] = rec
	return os.Remove(s.path(rec.ID, deltaFile))
}

// restoreRecord writes a record with the old base again: a record whose writing failed may still be on the disk. If this fails too, the new
// base stays until this process ends, because the next process may find either record. The caller holds s.mu.
func (s *checkpointStore) restoreRecord(old *checkpointRecord, base core.BaseID) error {
	if now, err := readRecord(s.path(old.ID, "")); err == nil && now != nil && now.Base == old.Base {
		return nil // nothing was replaced
	}
	err := atomicfile.WriteJSON(s.path(old.ID, recordFile), old, 0o600)
	if err != nil {
		s.lent[base]++
	}
	return err
}

// remove deletes a checkpoint. Forks that have it open are not disturbed. It is no error if there is no such checkpoint.
func (s *checkpointStore) remove(id core.CheckpointID) error {
	s.mu.Lock()
	_, there := s.records[id]
	delete(s.records, id)
	delete(s.used, id)
	s.mu.Unlock()
	if !there {
		_, err := s.removeTrash(id, true)
		return err
	}
	return s.removeFiles(id)
}

// removeFiles removes the files of a checkpoint without a record.
func (s *checkpointStore) removeFiles(id core.CheckpointID) error {
	gone := filepath.Join(s.dir, partPrefix+string(id))
	if err := errors.Join(os.RemoveAll(gone), atomicfile.Rename(filepath.Join(s.dir, string(id)), gone)); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(gone), s.collect())
}

// opened is a checkpoint with all its files open, so that it can be forked even if it is removed meanwhile.
type opened struct {
	*checkpointRecord
	base    *memory.Base
	delta   *memory.Delta // nil when the base is the whole memory
	state   []byte
	overlay *os.File
	store   *checkpointStore
	// manifest is the digest that its bytes were verified against; empty for a checkpoint that was captured here.
	manifest core.Digest
}

// open does not look into the trash: only a request that names a checkpoint takes it back from there.
func (s *checkpointStore) open(id core.CheckpointID) (_ *opened, err error) {
	s.hold(id)
	defer func() {
		if err != nil {
			s.release(id)
		}
	}()
	for {
		rec, err := s.get(id)
		if err != nil {
			return nil, err
		}
		o, err := s.openRecord(rec)
		if err == nil {
			return o, nil
		}
		// A rebase or a removal in between changes the record: look again.
		if now, lookErr := s.get(id); lookErr != nil {
			return nil, lookErr
		} else if now == rec {
			return nil, fmt.Errorf("open checkpoint %s: %w", id, err)
		}
	}
}

func (s *checkpointStore) openRecord(rec *checkpointRecord) (_ *opened, err error) {
	o := &opened{checkpointRecord: rec, store: s}
	s.lend(rec.Base)
	defer func() {
		if err != nil {
			err = errors.Join(err, o.closeFiles())
		}
	}()
	if o.base, err = s.bases.Open(rec.Base); err != nil {
		return nil, err
	}
	if rec.hasDelta() {
		if o.delta, err = memory.OpenDelta(s.path(rec.ID, deltaFile)); err != nil {
			return nil, err
		}
	}
	if o.state, err = os.ReadFile(s.path(rec.ID, stateFile)); err != nil {
		return nil, err
	}
	if int64(len(o.state)) != rec.DeviceStateBytes {
		return nil, core.Errorf(core.DataLoss, core.CodeCheckpointCorrupt, "the device state of checkpoint %s has %d bytes instead of %d", rec.ID, len(o.state), rec.DeviceStateBytes)
	}
	o.overlay, err = os.Open(s.path(rec.ID, overlayFile))
	return o, err
}

func (o *opened) close() error {
	defer o.store.release(o.ID)
	return o.closeFiles()
}

func (o *opened) closeFiles() error {
	var errs []error
	if o.overlay != nil {
		errs = append(errs, o.overlay.Close())
	}
	if o.delta != nil {
		o.delta.Close()
	}
	if o.base != nil {
		errs = append(errs, o.base.Close())
	}
	return errors.Join(append(errs, o.store.giveBack(o.Base))...)
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
