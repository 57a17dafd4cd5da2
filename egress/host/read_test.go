package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/internal/sidecar"
)

// spoolIn opens the spool of a directory.
func spoolIn(t *testing.T, dir string, limit int64) *spool {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := openSpool(root, limit, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.close(); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	})
	return s
}

// reported returns everything that a spool reports, and fails if a batch does not fit into a message.
func reported(t *testing.T, s *spool) (list []core.Flow) {
	t.Helper()
	for after := int64(0); after < s.last; {
		s.mu.Lock()
		if s.given != 0 && after == s.given {
			s.at, s.given = s.next, 0
			s.forget()
		}
		batch, err := s.read()
		s.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		if len(batch.Flows) == 0 {
			break
		}
		encoded, err := json.Marshal(egressapi.Response{Batch: &batch})
		if err != nil || len(encoded) > sidecar.MaxMessage {
			t.Fatalf("a batch of %d flows has %d bytes: %v", len(batch.Flows), len(encoded), err)
		}
		list, after = append(list, batch.Flows...), batch.Last
	}
	return list
}

// ofAnother writes a segment in the form of an older version.
func ofAnother(t *testing.T, dir string, first int64, lines ...string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf(nameForm, first)), []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func recordOf(t *testing.T, n int64, f core.Flow) string {
	t.Helper()
	b, err := json.Marshal(line{N: n, Flow: &f})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestSpoolOfOldVersion: records of any length from an older version, and lines that are not records, block nothing.
// What can be read is reported; the rest is set aside and counted, also when the process starts again before anything
// was acknowledged.
func TestSpoolOfOldVersion(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	flow := func(id, reason string) core.Flow {
		return core.Flow{ID: id, SandboxID: "sbx_1", At: time.Now(), Spoken: core.SpokenHTTP, Host: id + ".example", Port: 80, Outcome: core.FlowDenied, Reason: reason}
	}
	under := flow("under-way", strings.Repeat("&", 100_000))
	under.Outcome = core.FlowAllowed
	head, err := json.Marshal(line{Open: []core.Flow{under}})
	if err != nil {
		t.Fatal(err)
	}
	ofAnother(t, dir, 1, string(head),
		recordOf(t, 1, flow("a", "as usual")),
		recordOf(t, 2, flow("b", strings.Repeat("&", 60_000))), // 360 KB
		"{\"n\":3,\"flow\":{\"id\":\"c",
		recordOf(t, 4, flow("d", strings.Repeat("x", 2<<20))),
		"\x00\xff\x00",
		recordOf(t, 5, flow("e", "as usual")))
	if err := os.Mkdir(filepath.Join(dir, fmt.Sprintf(nameForm, 6)), 0o700); err != nil { // a directory in place of a file
		t.Fatal(err)
	}
	ofAnother(t, dir, 7, "this is no head", recordOf(t, 7, flow("f", "as usual")))
	for i := range 3 {
		s := spoolIn(t, dir, 64<<20)
		got := map[string]core.Flow{}
		for _, f := range reported(t, s) {
			got[f.ID] = f
		}
		for _, id := range []string{"a", "e", "f"} {
			if got[id].Reason != "as usual" {
				t.Errorf("time %d: %s is %+v", i, id, got[id])
			}
		}
		if r := got["b"].Reason; !strings.HasPrefix(r, "&&&") || len(r) > core.MaxFlowReason {
			t.Errorf("time %d: the long record is reported with a reason of %d bytes", i, len(r))
		}
		if f := got["under-way"]; f.Outcome != core.FlowFailed || f.Ended.IsZero() {
			t.Errorf("time %d: what was under way is %+v", i, f)
		}
		// The directory is set aside as a whole, at the first start.
		if found := s.aside.found; found[tooLong] != 1 || found[unreadable] < 3 || found[wasClipped] != 1 {
			t.Errorf("time %d: set aside: %v", i, found)
		}
		if err := s.close(); err != nil {
			t.Fatal(err)
		}
	}
	kept, err := filepath.Glob(filepath.Join(dir, asideName+"*"))
	if err != nil || len(kept) != 5 {
		t.Errorf("what was set aside is in %q, %v", kept, err)
	}
}

// TestBatches: a batch always fits into a message, whatever texts the flows have, and no flow is left out.
func TestBatches(t *testing.T) {
	t.Parallel()
	s := spoolIn(t, t.TempDir(), 64<<20)
	n := 0
	for range 400 {
		for _, text := range []string{"&", "x", "\"", "\u2028", "\xff", "é"} {
			n++
			f := core.Flow{ID: fmt.Sprint("f", n), SandboxID: "sbx_1", At: time.Now(), Outcome: core.FlowDenied}
			f.Host, f.Path, f.Method, f.Rule, f.Reason = strings.Repeat(text, 5000), strings.Repeat(text, n), strings.Repeat(text, 90), strings.Repeat(text, 700), strings.Repeat(text, 60_000)
			if err := s.Begin(f); err != nil {
				t.Fatal(err)
			}
		}
	}
	if list := reported(t, s); len(list) != n {
		t.Errorf("%d of %d were reported", len(list), n)
	}
}

// TestCrowded: any number of sandboxes that fill their shares still leave room for a sandbox that has little in the
// spool.
func TestCrowded(t *testing.T) {
	t.Parallel()
	s := spoolIn(t, t.TempDir(), 64<<20)
	n := 0
	begin := func(id core.SandboxID) error {
		n++
		return s.Begin(core.Flow{ID: fmt.Sprint("f", n), SandboxID: id, At: time.Now(), Outcome: core.FlowAllowed, Host: "a.example", Path: strings.Repeat("x", 150)})
	}
	for i := range 2 * shares {
		for begin(core.SandboxID(fmt.Sprint("sbx_loud", i))) == nil {
		}
	}
	if s.bytes+s.reserved > s.max {
		t.Errorf("%d bytes and %d for ends, of %d", s.bytes, s.reserved, s.max)
	}
	for i := range 20 {
		if err := begin(core.SandboxID(fmt.Sprint("sbx_quiet", i))); err != nil {
			t.Fatalf("a sandbox that sends a little: %v", err)
		}
	}
}
