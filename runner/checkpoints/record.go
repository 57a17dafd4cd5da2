package checkpoints

import (
	"cmp"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/roots"
)

// The files of a checkpoint.
const (
	RecordFile  = "checkpoint.json"
	StateFile   = "device.state"
	DeltaFile   = "memory.delta"
	OverlayFile = "overlay.ext4"
	SurveyFile  = "survey.json"
	SealedFile  = "sealed.json" // marks a checkpoint that is in the store, and has its place there
)

// PartPrefix begins the name of a directory that is not a whole checkpoint: of an unfinished capture, fetch or removal.
const PartPrefix = ".part-"

// Record is immutable once it is published; a rebase publishes another one.
type Record struct {
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

// HasDelta reports whether the memory is a base and a delta.
func (r *Record) HasDelta() bool { return r.DeltaBytes > 0 && !r.Rebased }

// RootKey is the key of the root file system of a checkpoint's guest.
func (r *Record) RootKey() roots.Key { return cmp.Or(r.Root, roots.Own(r.Image)) }

// ImageIDs are the images that a checkpoint needs besides its own directory.
func (r *Record) ImageIDs() []string {
	return []string{string(r.Base), lazy.RootID(string(r.RootKey()))}
}
