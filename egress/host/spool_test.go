package host

import (
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// TestShare: a sandbox fills its share of the spool and no more, also after a restart of the process, until its flows
// have been reported.
func TestShare(t *testing.T) {
	t.Parallel()
	const limit = 64 << 20
	dir, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	open := func() *spool {
		s, err := openSpool(dir, limit, slog.New(slog.NewTextHandler(t.Output(), nil)))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open()
	n := 0
	begin := func(id core.SandboxID, o core.Outcome) (core.Flow, error) {
		n++
		f := core.Flow{ID: fmt.Sprint("f", n), SandboxID: id, At: time.Now(), Outcome: o, Host: "a.example", Reason: strings.Repeat("x", 8<<10)}
		return f, s.Begin(f)
	}
	fill := func(id core.SandboxID) {
		for {
			if _, err := begin(id, core.FlowDenied); err != nil {
				if core.CategoryOf(err) != core.Exhausted || !strings.Contains(err.Error(), string(id)) {
					t.Fatal(err)
				}
				return
			}
		}
	}
	fill("sbx_loud")
	if got := s.bytes; got > limit/shares+segmentSize || got < limit/shares-segmentSize {
		t.Errorf("%d bytes are one's share of %d", got, limit)
	}
	f, err := begin("sbx_other", core.FlowAllowed)
	if err != nil {
		t.Errorf("another's flow: %v", err)
	}
	f.Ended = time.Now()
	s.End(f)
	if s.reserved != 0 || len(s.room) != 0 || s.of["sbx_other"] > 32<<10 {
		t.Errorf("reserved %d, %v; of the other's %d", s.reserved, s.room, s.of["sbx_other"])
	}
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
	s = open()
	if _, err := begin("sbx_loud", core.FlowDenied); err == nil {
		t.Error("a new process has forgotten what waits")
	}
	for last := int64(0); last < s.last; { // until everything is reported
		batch, err := s.after(t.Context(), last)
		if err != nil {
			t.Fatal(err)
		}
		last = batch.Last
	}
	s.mu.Lock()
	s.at, s.given = s.next, 0
	s.forget()
	s.mu.Unlock()
	if _, err := begin("sbx_loud", core.FlowDenied); err != nil {
		t.Errorf("when all has been reported: %v", err)
	}
	if err := s.close(); err != nil {
		t.Error(err)
	}
}
