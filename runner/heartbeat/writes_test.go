package heartbeat_test

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/runner/writelog"
)

// writesTaken is how many writes of a heartbeat the controller of these tests takes.
const writesTaken = 2

// plane is a data plane that nobody uses, with a log of writes.
type plane struct{ *writelog.Log }

func (plane) Keys() []core.KeyID                        { return nil }
func (plane) Used() []core.WorkspaceID                  { return nil }
func (plane) End([]core.KeyID)                          {}
func (p plane) Writes() (string, []runnerapi.DataWrite) { return p.Pending() }

// TestWritesThatWereNotTakenAreReportedAgain: the runner forgets the writes that the controller says it took, and no others.
func TestWritesThatWereNotTakenAreReportedAgain(t *testing.T) {
	t.Parallel()
	log, err := writelog.Open(filepath.Join(t.TempDir(), "writes.log"), "rn_1", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := log.Close(); err != nil {
			t.Error(err)
		}
	})
	const all = 5
	for i := range all {
		if _, _, err := log.Append(runnerapi.DataWrite{KeyID: "key_1", Path: fmt.Sprint("/", i)}); err != nil {
			t.Fatal(err)
		}
	}
	x := newRigWith(t, plane{log}, 0)
	eventually.True(t, "all writes are taken", func() bool {
		_, list := log.Pending()
		return len(list) == 0
	})
	x.set(func(c *controller) {
		next := int64(1)
		for _, b := range c.beats {
			if len(b.DataWrites) == 0 {
				continue
			}
			if got := b.DataWrites[0].Number; got > next {
				t.Errorf("write %d is reported first, and write %d was not taken", got, next)
			}
			next = b.DataWrites[0].Number + int64(min(writesTaken, len(b.DataWrites)))
		}
		if next != all+1 {
			t.Errorf("the writes up to %d were taken", next-1)
		}
	})
}
