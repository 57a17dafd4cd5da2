package model

import (
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
)

// ImageRef says which image something was made from.
type ImageRef struct {
	Name   string
	Digest core.Digest
}

// Image is a guest image that at least one runner holds.
type Image struct {
	ID        core.ImageID
	Name      string // one of its names; empty if it no longer has one
	Digest    core.Digest
	SizeBytes int64
	BuiltAt   time.Time
	Runners   []core.RunnerID
}

// Runner is a host's agent as the controller knows it.
type Runner struct {
	Info           runnerapi.Info
	Endpoint       string
	DataOwnCert    bool   // that shows a certificate of the cluster's authority
	DataURL        string // where users reach its data plane; empty: through the controller
	Fresh          bool   // its lease has not run out
	Draining       bool
	Fenced         bool // given up: silent for so long that it has killed its sandboxes itself
	LeaseEpoch     int64
	LeaseExpiresAt time.Time
	HeartbeatAt    time.Time
	Used           runnerapi.Capacity // according to the rows, not to its own report
	ImagesSum      string             // of the list of images that was recorded last

	Chosen placement.Request // the request for which placement chose it; no row has it
}
