package transfer

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// maxImportText bounds the bytes of one text of a file that rows keep.
const maxImportText = 512

// describe checks the file's description of the checkpoint, and makes the row.
func (im *importing) describe(name string) error {
	if name != "" {
		if err := core.ValidateName("name", name); err != nil {
			return err
		}
	}
	h := im.file.Manifest
	if err := h.Resources.Validate(); err != nil {
		return badImport("%s", core.MessageOf(err))
	}
	class := runnerapi.ClassOf(h.Class)
	fields := class.Fields()
	if len(h.Class) != len(fields) {
		return badImport("it does not say what it needs of a host")
	}
	for key, v := range fields {
		if _, there := h.Class[key]; !there || !plain(v) || key != "cpu_model" && v == "" {
			return badImport("it does not say what %s it needs of a host", key)
		}
	}
	if err := im.checkImages(); err != nil {
		return err
	}
	captured, err := time.Parse(time.RFC3339Nano, h.CapturedAt)
	if err != nil || captured.Year() < 1 || captured.Year() > 9999 {
		return badImport("it does not say when it was captured")
	}
	if _, err := core.ParseDigest(string(h.GuestImage)); err != nil || !plain(im.file.Export.ImageName) {
		return badImport("it does not name its image")
	}
	record, err := recordIn(h.Record)
	if err != nil {
		return err
	}
	if im.record, err = json.Marshal(record); err != nil {
		return err
	}
	im.row = model.Checkpoint{
		ID: core.NewID[core.CheckpointID](), ProjectID: im.project, Kind: model.KindUser, Name: name, Resources: h.Resources, Class: &class,
		Image:    model.ImageRef{Name: im.file.Export.ImageName, Digest: im.file.Content(runnerapi.ImageRoot)},
		Imported: &model.Imported{CheckpointID: h.CheckpointID, Image: h.GuestImage, CapturedAt: captured},
		// No image of this cluster has its root file system, which is therefore charged with the disk.
		DeltaBytes: im.inUse(runnerapi.ImageMemory), DiskBytes: im.inUse(runnerapi.ImageDisk) + im.inUse(runnerapi.ImageRoot),
		DeviceStateBytes: im.file.Image(runnerapi.ImageState).Size(),
		PauseMS:          record.PauseMS, Timings: record.Timings, StaleProcesses: record.Processes,
	}
	return nil
}

// inUse is how many bytes of an image are not zeros.
func (im *importing) inUse(image string) int64 {
	n := int64(0)
	for r := range im.file.Image(image).Runs() {
		n += int64(r.Count)
	}
	return n * manifest.PageSize
}

// checkImages refuses images that no runner would accept.
func (im *importing) checkImages() error {
	h := im.file.Manifest
	sizes := map[string]struct{ least, most int64 }{
		runnerapi.ImageMemory: {int64(h.Resources.MemoryMiB) << 20, int64(h.Resources.MemoryMiB) << 20},
		runnerapi.ImageDisk:   {int64(h.Resources.DiskGiB) << 30, int64(h.Resources.DiskGiB) << 30},
		runnerapi.ImageState:  {1, runnerapi.MaxDeviceState},
		runnerapi.ImageSurvey: {0, runnerapi.MaxDeviceState},
		runnerapi.ImageRoot:   {1, runnerapi.MaxRoot},
	}
	for name, size := range sizes {
		tree := im.file.Image(name)
		if tree == nil && name == runnerapi.ImageSurvey {
			continue
		}
		if tree == nil || tree.Size() < size.least || tree.Size() > size.most {
			return badImport("its image %s is missing or has another size than it must have", name)
		}
	}
	for _, image := range h.Images {
		if _, known := sizes[image.Name]; !known {
			return badImport("it has an image %q, and no checkpoint has such an image", core.Clip(image.Name))
		}
	}
	return nil
}

// recordIn keeps the useful parts of the record. It drops the reseal of the captured workspace, which belongs to another cluster.
func recordIn(b json.RawMessage) (runnerapi.StoredRecord, error) {
	r, whole, err := runnerapi.DecodeRecord(b)
	if err != nil {
		return r, badImport("its record of the capture cannot be read")
	}
	if !whole || r.PauseMS < 0 {
		return r, badImport("its record of the capture has invalid values")
	}
	r.ParentReseal = nil
	for i := range r.Timings {
		r.Timings[i].Stage = shown(r.Timings[i].Stage)
	}
	for i := range r.Processes {
		r.Processes[i].Command, r.Processes[i].Runtime = shown(r.Processes[i].Command), shown(r.Processes[i].Runtime)
	}
	return r, nil
}

// shown makes a text of a guest that can be stored and shown.
func shown(s string) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	return strings.ToValidUTF8(s[:min(len(s), maxImportText)], "")
}

// plain reports whether a text of a file can be stored and shown.
func plain(s string) bool {
	if len(s) > maxImportText || !utf8.ValidString(s) {
		return false
	}
	for _, r := range s {
		if unicode.IsControl(r) {
			return false
		}
	}
	return true
}

func badImport(format string, a ...any) error {
	return core.Errorf(core.Invalid, core.CodeImportInvalid, "this file cannot be imported: %s", fmt.Sprintf(format, a...))
}
