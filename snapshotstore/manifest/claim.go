package manifest

import (
	"maps"

	"github.com/coppice-dev/coppice/core"
)

// Claim is what the controller's rows say about a checkpoint. The writer of a manifest may lie in it: a reader believes
// the rows.
type Claim struct {
	ProjectID    core.ProjectID
	CheckpointID core.CheckpointID
	Parent       core.CheckpointID // empty: a root
	GuestImage   core.Digest
	Class        map[string]string
	Resources    core.Resources
}

// Check refuses a manifest that differs from the rows, and names the field.
func (h Header) Check(c Claim) error {
	var field string
	switch {
	case h.ProjectID != c.ProjectID:
		field = "project_id"
	case h.CheckpointID != c.CheckpointID:
		field = "checkpoint_id"
	case h.Parent != c.Parent:
		field = "parent"
	case h.GuestImage != c.GuestImage:
		field = "guest_image"
	case !maps.Equal(h.Class, c.Class):
		field = "class"
	case h.Resources.VCPUs != c.Resources.VCPUs || h.Resources.MemoryMiB != c.Resources.MemoryMiB || h.Resources.DiskGiB > c.Resources.DiskGiB:
		field = "resources"
	default:
		return nil
	}
	return core.Errorf(core.DataLoss, core.CodeManifestInvalid, "the manifest of checkpoint %s has another %s than the controller's row, so it is refused", c.CheckpointID, field)
}
