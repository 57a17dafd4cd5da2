package runner

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/boundjson"
)

// survey is what a guest said of itself at its capture. It is kept beside the checkpoint's bytes and believed by nobody: it says
// what a comparison of two checkpoints shows.
type survey struct {
	DiskFlushed bool                   `json:"disk_flushed"`       // the overlay has all that was written before the freeze
	FlushMS     float64                `json:"flush_ms,omitempty"` // of the flush in the freeze
	Processes   []core.WorkloadProcess `json:"processes"`
	Truncated   bool                   `json:"truncated,omitempty"` // there were more processes
}

func surveyOf(frozen guestapi.QuiesceResponse) survey {
	return survey{DiskFlushed: frozen.Flushed, FlushMS: frozen.FlushMS, Processes: frozen.Workload, Truncated: frozen.WorkloadTruncated}
}

// write makes it durable in the directory of a capture.
func (s survey) write(dir string) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, surveyFile), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

// maxSurvey bounds what is read back: the longest list, with room. With an imported checkpoint it is whatever somebody wrote.
const maxSurvey = 2 << 20

var boundSurvey = boundjson.Bound{
	Name: "the survey", Bytes: maxSurvey, Elements: 16 << 10, List: 2 << 10, Depth: 4, String: maxSurvey, Text: maxSurvey,
}

// survey reads what a checkpoint's guest said. known is false for a checkpoint of an earlier version, which kept nothing.
func (s *checkpointStore) survey(id core.CheckpointID) (out survey, known bool, err error) {
	f, err := os.Open(s.path(id, surveyFile))
	if errors.Is(err, os.ErrNotExist) {
		return survey{}, false, nil
	}
	if err != nil {
		return survey{}, false, err
	}
	defer f.Close()
	if err := boundjson.Decode(f, boundSurvey, nil, &out); err != nil {
		return survey{}, false, core.Wrapf(err, core.DataLoss, core.CodeCheckpointCorrupt, "what the guest of checkpoint %s said of itself cannot be read", id)
	}
	return out, true, nil
}
