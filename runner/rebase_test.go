package runner

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/runner/checkpoints"
)

// TestRebaseThatFailed: a record whose writing failed may be on disk all the same. It does not name a base that is gone: the old one is
// written again, or, where that fails too, both bases stay.
func TestRebaseThatFailed(t *testing.T) { //nolint:paralleltest // the failpoint is one of all runners
	r := newFakeRig(t, func(c *Config) { c.Store.Floor, c.Rebase.Off = 1, true })
	id := r.capture(r.fork(r.boot()))
	armed, err := failpoint.Arm("rebase.written", failpoint.Action{Kind: failpoint.Fail})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(armed.Disarm)
	if err := r.Rebase(id); !errors.Is(err, failpoint.ErrInjected) {
		t.Fatal(err)
	}
	bases := func() int {
		t.Helper()
		list, err := r.bases.List()
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	if n := bases(); n != 1 {
		t.Errorf("%d bases, want the old one", n)
	}
	r.stop()
	r.start()
	r.fork(id)

	record := r.checkpoints.Path(id, checkpoints.RecordFile)
	good, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(record), os.MkdirAll(filepath.Join(record, "x"), 0o700)); err != nil { // it cannot be written
		t.Fatal(err)
	}
	if err := r.Rebase(id); err == nil {
		t.Error("nothing is wrong")
	}
	if n := bases(); n != 2 {
		t.Errorf("%d bases, and the record may name either of two", n)
	}
	if err := errors.Join(os.RemoveAll(record), os.WriteFile(record, good, 0o600)); err != nil {
		t.Fatal(err)
	}
	r.stop()
	r.start()
	if n := bases(); n != 1 {
		t.Errorf("%d bases after a restart", n)
	}
	r.fork(id)
}
