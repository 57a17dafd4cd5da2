package checkpoints

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// TestSurveyIsBounded reads back what a guest is said to have said of itself. With an imported checkpoint it may be anything.
func TestSurveyIsBounded(t *testing.T) { //nolint:paralleltest // it measures the heap of the process
	s := &Store{dir: t.TempDir()}
	read := func(text string) (Survey, uint64, error) {
		id := core.NewID[core.CheckpointID]()
		if err := errors.Join(os.Mkdir(s.Path(id, ""), 0o700), os.WriteFile(s.Path(id, SurveyFile), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		out, _, err := s.Survey(id)
		runtime.ReadMemStats(&after)
		return out, after.TotalAlloc - before.TotalAlloc, err
	}
	one := `{"pid":1,"start_ticks":2,"command":"` + strings.Repeat("c", 120) + `","args":"` + strings.Repeat("a", 120) + `"}`
	if out, _, err := read(`{"processes":[` + strings.Repeat(one+",", 1023) + one + `],"truncated":true}`); err != nil || len(out.Processes) != 1024 || !out.Truncated {
		t.Errorf("the longest list: %d processes, %v", len(out.Processes), err)
	}
	for name, text := range map[string]string{
		"many bytes":     `{"processes":[{"command":"` + strings.Repeat("c", maxSurvey) + `"}]}`,
		"bytes behind":   `{"processes":[]` + strings.Repeat(" ", maxSurvey) + `}`,
		"many processes": `{"processes":[` + strings.Repeat("{},", maxSurvey/3-100) + `{}]}`,
	} {
		out, took, err := read(text)
		if core.CodeOf(err) != core.CodeCheckpointCorrupt || len(out.Processes) > 0 {
			t.Errorf("%s: %d processes, %v", name, len(out.Processes), err)
		}
		if took > 16<<20 {
			t.Errorf("%s: %d bytes were allocated", name, took)
		}
	}
}
