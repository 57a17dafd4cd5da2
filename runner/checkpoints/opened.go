package checkpoints

import (
	"errors"
	"fmt"
	"os"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
)

// Opened is a checkpoint with all its files open, so that it can be forked even if it is removed meanwhile.
type Opened struct {
	*Record
	Memory  *memory.Base
	Delta   *memory.Delta // nil when the base is the whole memory
	State   []byte        // of the devices
	Overlay *os.File
	// Manifest is the digest that its bytes were verified against; empty for a checkpoint that was captured here.
	Manifest core.Digest

	store *Store
}

// Open opens a checkpoint. It does not look into the trash: only a request that names a checkpoint takes it back from there.
func (s *Store) Open(id core.CheckpointID) (_ *Opened, err error) {
	s.Hold(id)
	defer func() {
		if err != nil {
			s.Release(id)
		}
	}()
	for {
		rec, err := s.Get(id)
		if err != nil {
			return nil, err
		}
		o, err := s.openRecord(rec)
		if err == nil {
			return o, nil
		}
		// A rebase or a removal in between changes the record: look again.
		if now, lookErr := s.Get(id); lookErr != nil {
			return nil, lookErr
		} else if now == rec {
			return nil, fmt.Errorf("open checkpoint %s: %w", id, err)
		}
	}
}

func (s *Store) openRecord(rec *Record) (_ *Opened, err error) {
	o := &Opened{Record: rec, store: s}
	s.RetainBase(rec.Base)
	defer func() {
		if err != nil {
			err = errors.Join(err, o.closeFiles())
		}
	}()
	if o.Memory, err = s.bases.Open(rec.Base); err != nil {
		return nil, err
	}
	if rec.HasDelta() {
		if o.Delta, err = memory.OpenDelta(s.Path(rec.ID, DeltaFile)); err != nil {
			return nil, err
		}
	}
	if o.State, err = os.ReadFile(s.Path(rec.ID, StateFile)); err != nil {
		return nil, err
	}
	if int64(len(o.State)) != rec.DeviceStateBytes {
		return nil, core.Errorf(core.DataLoss, core.CodeCheckpointCorrupt, "the device state of checkpoint %s has %d bytes instead of %d", rec.ID, len(o.State), rec.DeviceStateBytes)
	}
	o.Overlay, err = os.Open(s.Path(rec.ID, OverlayFile))
	return o, err
}

// Close closes the files. From then on the checkpoint may be given up.
func (o *Opened) Close() error {
	defer o.store.Release(o.ID)
	return o.closeFiles()
}

func (o *Opened) closeFiles() error {
	var errs []error
	if o.Overlay != nil {
		errs = append(errs, o.Overlay.Close())
	}
	if o.Delta != nil {
		o.Delta.Close()
	}
	if o.Memory != nil {
		errs = append(errs, o.Memory.Close())
	}
	return errors.Join(append(errs, o.store.ReleaseBase(o.Base))...)
}

// Side is a checkpoint that is being compared. Its files are open, so it may be removed meanwhile.
type Side struct {
	*Record
	Overlay  *os.File
	Memory   memory.Image
	Survey   Survey
	Surveyed bool // the guest was surveyed
	release  func()
}

// Close closes the files.
func (d *Side) Close() {
	defer d.release()
	for _, f := range []*os.File{d.Overlay, d.Memory.Base} {
		if f != nil {
			_ = f.Close() // only read
		}
	}
	if d.Memory.Delta != nil {
		d.Memory.Delta.Close()
	}
}

// Read opens a checkpoint for a comparison; it loads nothing for VMMs.
func (s *Store) Read(id core.CheckpointID) (*Side, error) {
	for {
		rec, err := s.Get(id)
		if err != nil {
			return nil, err
		}
		d, err := s.readSide(rec)
		if err == nil {
			return d, nil
		}
		// A rebase or a removal in between changes the record: look again.
		if now, lookErr := s.Get(id); lookErr != nil {
			return nil, lookErr
		} else if now == rec {
			return nil, fmt.Errorf("read checkpoint %s: %w", id, err)
		}
	}
}

func (s *Store) readSide(rec *Record) (_ *Side, err error) {
	s.Hold(rec.ID)
	d := &Side{Record: rec, release: func() { s.Release(rec.ID) }}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if d.Memory.Base, err = s.bases.OpenFile(rec.Base); err != nil {
		return nil, err
	}
	if rec.HasDelta() {
		if d.Memory.Delta, err = memory.OpenDelta(s.Path(rec.ID, DeltaFile)); err != nil {
			return nil, err
		}
	}
	if d.Survey, d.Surveyed, err = s.Survey(rec.ID); err != nil {
		return nil, err
	}
	d.Overlay, err = os.Open(s.Path(rec.ID, OverlayFile))
	return d, err
}
