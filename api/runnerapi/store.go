package runnerapi

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/coppice-dev/coppice/core"
)

// Sealing: a runner uploads the checkpoints that it holds, parents first, one after the other, and tells the controller. It asks for
// leave before it writes anything to the store (BeginSeal), so that no object is there that the controller does not know of, and
// what it has written counts once the controller has taken it (CommitSeal). Every message is idempotent and fenced by the runner's
// lease; an attempt that was given up, or that another has replaced, is refused with STATE_CONFLICT.
const (
	PathSeals      = "/internal/v1/runners/{id}/seals"                        // POST BeginSeal -> SealBegun
	PathSealCommit = "/internal/v1/runners/{id}/seals/{checkpoint_id}/commit" // POST CommitSeal -> {}
	PathSealFail   = "/internal/v1/runners/{id}/seals/{checkpoint_id}/fail"   // POST FailSeal -> {}
)

// Stored says where a sealed checkpoint is in the store. Its manifest is believed only with this digest.
type Stored struct {
	CheckpointID core.CheckpointID `json:"checkpoint_id"`
	Manifest     string            `json:"manifest"` // key of the object
	Digest       core.Digest       `json:"digest"`   // of the object's bytes
	Bytes        int64             `json:"bytes"`    // of the object
}

// BeginSeal asks for leave to upload a checkpoint. CHECKPOINT_NOT_FOUND: it was deleted meanwhile; CHECKPOINT_NOT_READY: its capture is not
// recorded yet; STATE_CONFLICT: it is sealed, and nothing else; RUNNER_LOST: of another lease, as of every message.
type BeginSeal struct {
	LeaseEpoch   int64             `json:"lease_epoch"`
	CheckpointID core.CheckpointID `json:"checkpoint_id"`
	// Ancestors that the runner holds the bytes of, nearest first, so that what has not changed since one of them is not stored again.
	Ancestors []core.CheckpointID `json:"ancestors,omitempty"`
}

// SealBegun gives leave. What the reference needs is kept for this attempt, whatever is deleted meanwhile, until the attempt ends.
type SealBegun struct {
	Attempt   int64          `json:"attempt"`
	ProjectID core.ProjectID `json:"project_id"`          // whose checkpoint it is
	Prefix    string         `json:"prefix"`              // every key of the attempt begins with this; it ends with a slash
	Reference *Stored        `json:"reference,omitempty"` // of the nearest of Ancestors that is sealed; nil when none is
	// KeyVersion says that everything is to be encrypted, and with which of the project's keys; 0: nothing is. Key is that of this attempt,
	// Keys are those of the reference.
	KeyVersion int64         `json:"key_version,omitempty"`
	Key        *core.DataKey `json:"key,omitempty"`
	Keys       Keys          `json:"keys,omitempty"`
}

// Keys are keys of objects by what the keys of all objects of their attempt begin with. They are kept in memory only.
type Keys map[string]core.DataKey

// StoredObject is one object in the store.
type StoredObject struct {
	Key   string `json:"key"`
	Bytes int64  `json:"bytes"`
}

// CommitSeal makes a checkpoint sealed: everything that its manifest names is in the store.
type CommitSeal struct {
	LeaseEpoch  int64          `json:"lease_epoch"`
	Attempt     int64          `json:"attempt"`
	Stored      Stored         `json:"stored"`
	Written     []StoredObject `json:"written"`      // objects of this attempt, the manifest among them
	Needs       []string       `json:"needs"`        // keys of all objects that a restore may read, those of the reference and of Written
	StoredBytes int64          `json:"stored_bytes"` // of Written
	Timings     []core.Timing  `json:"timings"`
}

// FailSeal gives an attempt up. What it has written is removed by the controller. Problem is shown to users until a later attempt
// succeeds.
type FailSeal struct {
	LeaseEpoch int64   `json:"lease_epoch"`
	Attempt    int64   `json:"attempt"`
	Problem    Problem `json:"problem"`
}

// StoredRecord is what a runner wants to know again of a checkpoint that it takes from the store: the record of its manifest. Fields are
// added, never renamed.
type StoredRecord struct {
	DeltaBytes       int64               `json:"delta_bytes"`
	DiskBytes        int64               `json:"disk_bytes"`
	DeviceStateBytes int64               `json:"device_state_bytes"`
	PauseMS          float64             `json:"pause_ms"`
	Timings          []core.Timing       `json:"timings,omitempty"`
	ParentReseal     []core.ResealStep   `json:"parent_reseal,omitempty"`
	Processes        []core.StaleProcess `json:"stale_prng_processes,omitempty"`
	// WorkingSet are the pages of memory that a machine uses first: pairs of unsigned varints, how many pages are left out and how many come
	// then. It is a hint.
	WorkingSet []byte `json:"working_set,omitempty"`
}

// The images of a checkpoint in the store.
const (
	ImageMemory = "memory"
	ImageDisk   = "disk"
	ImageState  = "device_state"
	ImageSurvey = "survey"
	ImageRoot   = "root"
)

// MaxDeviceState bounds what is read into memory: many times the largest.
const MaxDeviceState = 64 << 20

// MaxRoot is the largest root file system that is taken from a store or an imported file, in bytes.
const MaxRoot = 32 << 30

// MaxRecordList is how many elements of each list of a stored record are read.
const MaxRecordList = 4096

// DecodeRecord reads the record of a manifest. Of a longer list it takes the first MaxRecordList elements, and whole is false then: what
// a manifest says in eight megabytes would take a hundred times as much memory.
func DecodeRecord(b []byte) (r StoredRecord, whole bool, err error) {
	type plain StoredRecord
	lists := struct {
		*plain
		Timings      json.RawMessage `json:"timings"`
		ParentReseal json.RawMessage `json:"parent_reseal"`
		Processes    json.RawMessage `json:"stale_prng_processes"`
	}{plain: (*plain)(&r)}
	if err := json.Unmarshal(b, &lists); err != nil {
		return r, false, err
	}
	whole = true
	for _, err := range []error{
		firstOf(lists.Timings, &r.Timings, &whole), firstOf(lists.ParentReseal, &r.ParentReseal, &whole), firstOf(lists.Processes, &r.Processes, &whole),
	} {
		if err != nil {
			return r, false, err
		}
	}
	return r, whole, nil
}

// firstOf decodes the first MaxRecordList elements of a list; whole becomes false when there are more.
func firstOf[T any](b json.RawMessage, into *[]T, whole *bool) error {
	if len(b) == 0 || string(b) == "null" {
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	if open, err := dec.Token(); err != nil || open != json.Delim('[') {
		return fmt.Errorf("a list of the record begins with %v", open)
	}
	for dec.More() {
		if len(*into) == MaxRecordList {
			*whole = false
			return nil
		}
		var v T
		if err := dec.Decode(&v); err != nil {
			return err
		}
		*into = append(*into, v)
	}
	return nil
}

// Fields is the class as a manifest has it.
func (c RunnerClass) Fields() map[string]string {
	return map[string]string{
		"arch": c.Arch, "accelerator": c.Accelerator, "cpu_model": c.CPUModel, "vmm": c.VMM, "vmm_version": c.VMMVersion, "machine_type": c.MachineType,
	}
}

// ClassOf is the class that a manifest has.
func ClassOf(f map[string]string) RunnerClass {
	return RunnerClass{
		Arch: f["arch"], Accelerator: f["accelerator"], CPUModel: f["cpu_model"], VMM: f["vmm"], VMMVersion: f["vmm_version"], MachineType: f["machine_type"],
	}
}
