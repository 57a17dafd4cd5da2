// Package checkpoints keeps the checkpoints of one host on its disk: it publishes, lists, opens, deletes and rebases them, and decides which
// bases are still needed.
//
// A checkpoint is a directory with device state, the memory delta, the overlay, and a record that names the base. It is written under another
// name and published by rename. It never changes, with one exception: a rebase replaces base and delta by another base with the same bytes.
//
// A checkpoint that the database does not know goes to the trash, see package trash. A request that names it takes it back.
package checkpoints

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/trash"
)

// The steps at which a test makes a runner fail or end.
var (
	rebaseAfterBase = failpoint.New("rebase.after_base") // the base is on disk, no record names it
	rebaseWritten   = failpoint.New("rebase.written")    // the disk has the record, but it is not in use
	trashJudged     = failpoint.New("trash.judged")      // a checkpoint is not kept, and will be removed
)

// Config says where the checkpoints are and who is told of changes. All fields are required.
type Config struct {
	DataDir string
	Bases   *memory.BaseStore
	// Enter counts an operation of the runner until leave is called. It fails when the runner takes no work.
	Enter func() (leave func(), err error)
	// Published is called when there is a new checkpoint.
	Published func()
	// Forgotten is called before a checkpoint is removed or goes to the trash.
	Forgotten func(id core.CheckpointID)
	// Removed is called when bytes of a checkpoint were removed: the root file system of its guest may not be needed any more.
	Removed func() error
	Log     *slog.Logger
}

// Store keeps the checkpoints of this host. Its methods are safe for concurrent use.
type Store struct {
	cfg      Config
	dir      string
	trashDir string // on the same file system
	bases    *memory.BaseStore

	flightMu sync.Mutex // guards flights; it is locked before mu
	flights  map[core.CheckpointID]*flight

	mu       sync.Mutex // guards what follows
	records  map[core.CheckpointID]*Record
	making   int                 // number of bases that are being made and that no record names yet: no base is collected meanwhile
	retained map[core.BaseID]int // users of a base besides checkpoints: sandboxes and shells
	held     map[core.CheckpointID]int
	used     map[core.CheckpointID]time.Time // when each checkpoint was opened last
	freed    chan struct{}                   // closed when one of held is gone; nil: nobody waits
	trash    map[core.CheckpointID]Trashed
}

// New opens the checkpoints of a host and removes what nothing needs. Each base in retained has a sandbox, which releases the base when it ends.
func New(cfg Config, retained []core.BaseID) (*Store, error) {
	dir, trashDir := filepath.Join(cfg.DataDir, "checkpoints"), trash.Dir(cfg.DataDir)
	for _, d := range []string{dir, trashDir} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	if err := atomicfile.SyncDir(cfg.DataDir); err != nil {
		return nil, err
	}
	s := &Store{
		cfg: cfg, dir: dir, trashDir: trashDir, bases: cfg.Bases,
		records: make(map[core.CheckpointID]*Record), retained: make(map[core.BaseID]int), held: make(map[core.CheckpointID]int),
		used: make(map[core.CheckpointID]time.Time), trash: make(map[core.CheckpointID]Trashed), flights: make(map[core.CheckpointID]*flight),
	}
	for _, id := range retained {
		s.retained[id]++
	}
	if err := s.readTrash(); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), PartPrefix) { // an unfinished capture or removal of an earlier process
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return nil, err
			}
			continue
		}
		b, err := os.ReadFile(filepath.Join(dir, e.Name(), RecordFile))
		if err != nil {
			return nil, err
		}
		rec := new(Record)
		if err := json.Unmarshal(b, rec); err != nil || string(rec.ID) != e.Name() {
			return nil, core.Wrapf(err, core.DataLoss, core.CodeCheckpointCorrupt, "the record of checkpoint %s on this host is damaged", core.Clip(e.Name()))
		}
		if rec.Rebased { // a crash between the record and the removal leaves the delta that the base replaced
			if err := ignoreAbsent(os.Remove(s.Path(rec.ID, DeltaFile))); err != nil {
				return nil, err
			}
		}
		s.records[rec.ID] = rec
	}
	return s, s.Collect()
}

// Dir is the directory of all checkpoints.
func (s *Store) Dir() string { return s.dir }

// TrashDir is the directory of the trash, see package trash.
func (s *Store) TrashDir() string { return s.trashDir }

// Collect removes bases that nothing names.
func (s *Store) Collect() error {
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
		wanted[t.Record.Base] = true
	}
	var errs []error
	for _, id := range ids {
		if !wanted[id] && s.retained[id] == 0 {
			errs = append(errs, s.bases.Remove(id))
		}
	}
	return errors.Join(errs...)
}

// HoldBases keeps every base on disk until release is called: a base is published before the record that names it.
func (s *Store) HoldBases() (release func() error) {
	s.mu.Lock()
	s.making++
	s.mu.Unlock()
	return func() error {
		s.mu.Lock()
		s.making--
		s.mu.Unlock()
		return s.Collect()
	}
}

// RetainBase keeps a base on disk for a sandbox until ReleaseBase: later captures of that sandbox will name the base.
func (s *Store) RetainBase(id core.BaseID) {
	s.mu.Lock()
	s.retained[id]++
	s.mu.Unlock()
}

// ReleaseBase undoes one RetainBase. It removes the base when no other user is left.
func (s *Store) ReleaseBase(id core.BaseID) error {
	s.mu.Lock()
	s.retained[id]--
	last := s.retained[id] == 0
	if last {
		delete(s.retained, id)
	}
	s.mu.Unlock()
	if !last {
		return nil
	}
	return s.Collect()
}

// Get finds a checkpoint.
func (s *Store) Get(id core.CheckpointID) (*Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r, ok := s.records[id]; ok {
		return r, nil
	}
	return nil, core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "checkpoint %s is not on this runner", id)
}

// List returns all checkpoints, in no order.
func (s *Store) List() []*Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*Record, 0, len(s.records))
	for _, r := range s.records {
		out = append(out, r)
	}
	return out
}

// Path is where a file of a checkpoint is.
func (s *Store) Path(id core.CheckpointID, file string) string {
	return filepath.Join(s.dir, string(id), file)
}

// Begin makes the directory that a capture writes into.
func (s *Store) Begin(id core.CheckpointID) (dir string, err error) {
	dir = filepath.Join(s.dir, PartPrefix+string(id))
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	return dir, os.Mkdir(dir, 0o700)
}

// Publish makes a written directory the checkpoint: first durable, then visible.
func (s *Store) Publish(dir string, rec *Record) error {
	if err := atomicfile.WriteJSON(filepath.Join(dir, RecordFile), rec, 0o600); err != nil {
		return err
	}
	if err := atomicfile.Rename(dir, filepath.Join(s.dir, string(rec.ID))); err != nil {
		return err
	}
	s.mu.Lock()
	s.records[rec.ID], s.used[rec.ID] = rec, time.Now()
	s.mu.Unlock()
	s.cfg.Published()
	return nil
}

// replace publishes a record that names another base with the same bytes, and removes the delta. Forks that have the old delta
// open keep it.
func (s *Store) replace(ctx context.Context, rec *Record) error {
	if err := s.replaceRecord(ctx, rec); err != nil {
		return err
	}
	return s.Collect()
}

// replaceRecord holds the lock throughout: the checkpoint may be discarded, and taken back, at any time.
func (s *Store) replaceRecord(ctx context.Context, rec *Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, there := s.records[rec.ID]
	if !there {
		return core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "checkpoint %s was removed", rec.ID)
	}
	err := atomicfile.WriteJSON(s.Path(rec.ID, RecordFile), rec, 0o600)
	if err == nil {
		err = rebaseWritten.Hit(ctx)
	}
	if err != nil {
		return errors.Join(err, s.restoreRecord(old, rec.Base))
	}
	s.records[rec.ID] = rec
	return os.Remove(s.Path(rec.ID, DeltaFile))
}

// restoreRecord writes a record with the old base again: a record whose writing failed may still be on the disk. If this fails too, the new
// base stays until this process ends, because the next process may find either record. The caller holds s.mu.
func (s *Store) restoreRecord(old *Record, base core.BaseID) error {
	if now, err := readRecord(s.Path(old.ID, "")); err == nil && now != nil && now.Base == old.Base {
		return nil // nothing was replaced
	}
	err := atomicfile.WriteJSON(s.Path(old.ID, RecordFile), old, 0o600)
	if err != nil {
		s.retained[base]++
	}
	return err
}

// Delete removes a checkpoint. Forks that have it open are not disturbed. It is no error if there is no such checkpoint.
func (s *Store) Delete(id core.CheckpointID) error {
	s.cfg.Forgotten(id)
	if err := errors.Join(s.remove(id), s.cfg.Removed()); err != nil {
		return fmt.Errorf("delete checkpoint %s: %w", id, err)
	}
	return nil
}

func (s *Store) remove(id core.CheckpointID) error {
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
func (s *Store) removeFiles(id core.CheckpointID) error {
	gone := filepath.Join(s.dir, PartPrefix+string(id))
	if err := errors.Join(os.RemoveAll(gone), atomicfile.Rename(filepath.Join(s.dir, string(id)), gone)); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(gone), s.Collect())
}

// StoredAt returns the place of a checkpoint in the store, as this host noted it.
func (s *Store) StoredAt(id core.CheckpointID) (at runnerapi.Stored, err error) {
	err = atomicfile.ReadJSON(s.Path(id, SealedFile), &at)
	return at, err
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
