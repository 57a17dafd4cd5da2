package journal_test

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/journal"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// made makes the directory of a shell.
func made(t *testing.T) (dir string, shell journal.Shell) {
	t.Helper()
	shell = journal.Shell{ID: core.NewID[core.SandboxID](), ClusterID: "a", Slot: 3, Handle: &vmm.Handle{PID: 7}}
	dir = filepath.Join(t.TempDir(), string(shell.ID))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir, shell
}

// addresses says how to compare them.
var addresses = cmpopts.EquateComparable(netip.Addr{})

// TestNotes: a sandbox has notes from its announcement on, and its file has what was noted last.
func TestNotes(t *testing.T) {
	t.Parallel()
	dir, shell := made(t)
	if j, err := journal.Read(dir, "a"); j != nil || err != nil {
		t.Errorf("without a file: %+v, %v", j, err)
	}
	if err := journal.Write(dir, shell, nil); err != nil {
		t.Fatal(err)
	}
	n := journal.NewNotes(nil, func(s *journal.Sandbox) error { return journal.Write(dir, shell, s) })
	if err := n.Change(func(*journal.Sandbox) { t.Error("notes of a sandbox that was not announced are changed") }); !errors.Is(err, journal.ErrNotAnnounced) {
		t.Error(err)
	}
	if s, ok := n.Read(); ok {
		t.Errorf("it has notes before: %+v", s)
	}
	if j, err := journal.Read(dir, "a"); err != nil || j == nil || j.Sandbox != nil || j.Slot != 3 || journal.Inhabited(filepath.Dir(dir)) {
		t.Errorf("of a shell: %+v, %v", j, err)
	}
	first := journal.Sandbox{Egress: core.EgressDenyAll, Rules: runnerapi.EgressRules{Version: 2}}
	if err := n.Announce(first); err != nil {
		t.Fatal(err)
	}
	if err := n.Change(func(s *journal.Sandbox) { s.Rules.Version++ }); err != nil {
		t.Fatal(err)
	}
	want := first
	want.Rules.Version = 3
	got, ok := n.Read()
	if diff := cmp.Diff(want, got, addresses); diff != "" || !ok {
		t.Errorf("the notes, %t: %s", ok, diff)
	}
	j, err := journal.Read(dir, "a")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&want, j.Sandbox, addresses); diff != "" {
		t.Errorf("the file: %s", diff)
	}
	if !journal.Inhabited(filepath.Dir(dir)) {
		t.Error("a directory with a sandbox is not inhabited")
	}
}

// TestRead: a journal of another cluster is an error, and so is one that is damaged or has another version. One from before the start of the host is none.
func TestRead(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		text     string
		code     core.Code
		unusable bool
	}{
		"another cluster": {text: `{"version":1,"cluster_id":"b"}`, code: core.CodeStateConflict},
		"damaged":         {text: `{"ver`, unusable: true},
		"later":           {text: `{"version":2,"cluster_id":"a"}`, unusable: true},
		"another shell":   {text: `{"version":1,"cluster_id":"a","id":"x"}`, unusable: true},
		"of last boot":    {text: `{"version":1,"cluster_id":"a","boot":"yesterday"}`},
	} {
		dir, _ := made(t)
		if err := os.WriteFile(filepath.Join(dir, journal.File), []byte(test.text), 0o600); err != nil {
			t.Fatal(err)
		}
		j, err := journal.Read(dir, "a")
		_, unusable := errors.AsType[journal.UnusableError](err)
		if j != nil || unusable != test.unusable || test.code != "" && core.CodeOf(err) != test.code || test.code == "" && !test.unusable && err != nil {
			t.Errorf("%s: %+v, %v", name, j, err)
		}
	}
}
