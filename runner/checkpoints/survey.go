package checkpoints

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/boundjson"
)

// Survey is what a guest reported about itself at its capture. It is kept beside the checkpoint's bytes. Nothing relies on it: it is
// only shown in a comparison of two checkpoints.
type Survey struct {
	DiskFlushed bool                   `json:"disk_flushed"`       // the overlay has everything that was written before the freeze
	FlushMS     float64                `json:"flush_ms,omitempty"` // duration of the flush in the freeze
	Processes   []core.WorkloadProcess `json:"processes"`
	Truncated   bool                   `json:"truncated,omitempty"` // there were more processes

	// IdentityFiles are the files with the machine's identity, at most one for each path. Absent: the guest's agent did not report them.
	IdentityFiles []guestapi.IdentityFile `json:"identity_files,omitzero"`
}

// SurveyOf returns the report of a guest that was frozen.
func SurveyOf(frozen guestapi.QuiesceResponse) Survey {
	return Survey{
		DiskFlushed: frozen.Flushed, FlushMS: frozen.FlushMS, Processes: frozen.Workload, Truncated: frozen.WorkloadTruncated,
		IdentityFiles: frozen.IdentityFiles,
	}
}

// Write makes it durable in the directory of a capture.
func (s Survey) Write(dir string) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, SurveyFile), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

// maxSurvey bounds the file when it is read. The longest list fits with a margin. The file of an imported checkpoint may contain anything.
const maxSurvey = 2 << 20

var boundSurvey = boundjson.Bound{
	Name: "the survey", Bytes: maxSurvey, Elements: 16 << 10, List: 2 << 10, Depth: 4, String: maxSurvey, Text: maxSurvey,
}

// Survey reads the report of a checkpoint's guest. known is false for a checkpoint of an earlier version, which has no report.
func (s *Store) Survey(id core.CheckpointID) (out Survey, known bool, err error) {
	f, err := os.Open(s.Path(id, SurveyFile))
	if errors.Is(err, os.ErrNotExist) {
		return Survey{}, false, nil
	}
	if err != nil {
		return Survey{}, false, err
	}
	defer f.Close()
	if err := boundjson.Decode(f, boundSurvey, nil, &out); err != nil {
		return Survey{}, false, core.Wrapf(err, core.DataLoss, core.CodeCheckpointCorrupt, "the guest's survey in checkpoint %s cannot be read", id)
	}
	return out, true, nil
}
