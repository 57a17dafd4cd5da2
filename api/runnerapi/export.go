package runnerapi

import "github.com/coppice-dev/coppice/core"

// PathCheckpointExport is POST ExportCheckpoint -> the bytes of an exported file (docs/SNAPSHOT_FORMAT.md), with their length in
// Content-Length. The runner makes the file from what its host has. A cluster with a store does not use this route: a sealed checkpoint
// is read from there.
const PathCheckpointExport = "/v1/checkpoints/{id}/export"

// ExportCheckpoint has what the file needs and the runner does not know.
type ExportCheckpoint struct {
	ProjectID core.ProjectID `json:"project_id"`
	ImageName string         `json:"image_name"` // the guest image's name for people
}
