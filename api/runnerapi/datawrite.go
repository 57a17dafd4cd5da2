package runnerapi

import (
	"time"

	"github.com/coppice-dev/coppice/core"
)

// MaxDataWrites bounds the writes that one heartbeat reports, and MaxDataPath the path of each in bytes.
const (
	MaxDataWrites = 2048
	MaxDataPath   = 1024
)

// TakenWrites returns the part of the writes in a heartbeat that its answer acknowledges.
func TakenWrites(sent []DataWrite, out Heartbeated) []DataWrite {
	taken := out.DataTaken
	if taken <= 0 { // by a controller of before
		taken = MaxDataWrites
	}
	return sent[:min(len(sent), taken)]
}

// DataWrite is a write to a guest's files that a data plane has passed on: it did not come through a controller, so a heartbeat reports it for
// the audit log.
type DataWrite struct {
	// Number is 1 and up within Heartbeat.DataLog. A controller records each once. It is 0 from a runner of before.
	Number    int64          `json:"number,omitempty"`
	RequestID string         `json:"request_id"`
	SandboxID core.SandboxID `json:"sandbox_id"`
	KeyID     core.KeyID     `json:"key_id"` // that asked for the pass
	Source    string         `json:"source"` // address of the user
	Delete    bool           `json:"delete,omitempty"`
	Path      string         `json:"path"`
	At        time.Time      `json:"at"`
}
