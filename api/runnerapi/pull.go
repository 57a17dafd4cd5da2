package runnerapi

import "github.com/coppice-dev/coppice/core"

// Pull asks a runner to make an image of one of a registry, for a project. The id in the path names the pull: a repeated request says
// how far it is. A pull that nobody asks about for a while ends.
type Pull struct {
	Reference string `json:"reference"`
	// Hosts are HOST[:PORT] that the operator has named: they may have private addresses. All others are reached at public ones only.
	Hosts []string `json:"hosts,omitempty"`
	// PlainHTTP are those of them that have no TLS.
	PlainHTTP []string `json:"plain_http,omitempty"`
}

// PullState is how far a pull is.
type PullState struct {
	Done bool `json:"done"`
	// Reference and Manifest are what was pulled, and Image is the digest of the image that was made of it; empty before Done.
	Reference string      `json:"reference,omitempty"`
	Manifest  core.Digest `json:"manifest,omitempty"`
	Image     core.Digest `json:"image,omitempty"`
	// Stage is waiting, fetching or unpacking.
	Stage string `json:"stage"`
	// LayersDone counts those that were there before, and Bytes are those of the layers that have to be fetched.
	Layers     int   `json:"layers"`
	LayersDone int   `json:"layers_done"`
	Bytes      int64 `json:"bytes"`
	BytesDone  int64 `json:"bytes_done"`
}

// Stages of a pull.
const (
	PullWaiting   = "waiting"
	PullFetching  = "fetching"
	PullUnpacking = "unpacking"
)
