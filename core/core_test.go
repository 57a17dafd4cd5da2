package core_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
)

func TestIDs(t *testing.T) {
	t.Parallel()
	seen := make(map[core.WorkspaceID]bool)
	var last core.WorkspaceID
	for range 1000 {
		id := core.NewID[core.WorkspaceID]()
		if seen[id] {
			t.Fatalf("id %s came twice", id)
		}
		seen[id], last = true, id
		if got, err := core.ParseID[core.WorkspaceID](string(id)); err != nil || got != id {
			t.Fatalf("ParseID(%s) = %s, %v", id, got, err)
		}
	}
	for _, s := range []string{
		"", "ws_", string(last)[3:], "ckpt" + string(last)[2:], string(last) + "0", strings.ToUpper(string(last)),
		"ws_" + strings.Repeat("u", 26), "ws_" + strings.Repeat("0", 25) + "1", // a character outside of the alphabet, and invalid trailing bits
	} {
		if got, err := core.ParseID[core.WorkspaceID](s); core.CodeOf(err) != core.CodeInvalidID {
			t.Errorf("ParseID(%q) = %q, %v; want %s", s, got, err, core.CodeInvalidID)
		}
	}
	if got := core.Short(last); len(got) != 8 || !strings.HasSuffix(string(last), got) {
		t.Errorf("Short(%s) = %q", last, got)
	}
}

func FuzzParseID(f *testing.F) {
	f.Add("ws_06gzvhqj3m8q0000000000000g")
	f.Fuzz(func(t *testing.T, s string) {
		if id, err := core.ParseID[core.WorkspaceID](s); err == nil && string(id) != s {
			t.Errorf("ParseID(%q) = %q", s, id)
		}
	})
}

func TestDigest(t *testing.T) {
	t.Parallel()
	const want = core.Digest("sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
	if got := core.DigestOf([]byte("abc")); got != want {
		t.Errorf("DigestOf(abc) = %s", got)
	}
	if got, n, err := core.DigestReader(strings.NewReader("abc")); got != want || n != 3 || err != nil {
		t.Errorf("DigestReader(abc) = %s, %d, %v", got, n, err)
	}
	if got, err := core.ParseDigest(string(want)); err != nil || got.Hex() != string(want)[7:] || got.Short() != "ba7816bf8f01" {
		t.Errorf("ParseDigest = %s, %v", got, err)
	}
	for _, s := range []string{"", "sha256:", want.Hex(), string(want) + "0", strings.ToUpper(string(want)), "md5:" + want.Hex()} {
		if _, err := core.ParseDigest(s); core.CodeOf(err) != core.CodeInvalidDigest {
			t.Errorf("ParseDigest(%q) = %v, want %s", s, err, core.CodeInvalidDigest)
		}
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	cause := errors.New("secret detail")
	err := fmt.Errorf("layer: %w", core.Wrapf(cause, core.NotFound, core.CodeWorkspaceNotFound, "workspace %s does not exist", "x"))
	if core.CategoryOf(err) != core.NotFound || core.CodeOf(err) != core.CodeWorkspaceNotFound || !errors.Is(err, cause) {
		t.Errorf("%v: category %s, code %s", err, core.CategoryOf(err), core.CodeOf(err))
	}
	if got := core.MessageOf(err); got != "workspace x does not exist" {
		t.Errorf("MessageOf shows %q", got)
	}
	if got := core.MessageOf(cause); strings.Contains(got, "secret") {
		t.Errorf("MessageOf shows an inner cause: %q", got)
	}
	for _, tc := range []struct {
		err  error
		want core.Category
	}{{nil, ""}, {context.Canceled, core.Canceled}, {fmt.Errorf("x: %w", context.DeadlineExceeded), core.TimedOut}, {cause, core.Internal}} {
		if got := core.CategoryOf(tc.err); got != tc.want {
			t.Errorf("CategoryOf(%v) = %s, want %s", tc.err, got, tc.want)
		}
	}
}

// A state is a mistake in a table if no state leads to it, or if it leads nowhere and is not final.
func TestStatesAreConnected(t *testing.T) {
	t.Parallel()
	for _, s := range core.WorkspaceStates() {
		if s != core.WorkspaceCreating && s != core.WorkspaceRestoring && len(s.Sources()) == 0 {
			t.Errorf("nothing becomes %s", s)
		}
		if s.Final() && s.Live() {
			t.Errorf("%s is final and live", s)
		}
		for _, to := range core.WorkspaceStates() {
			if s.CanBecome(to) && s == core.WorkspaceTerminated {
				t.Errorf("%s becomes %s", s, to)
			}
		}
	}
	for _, s := range core.CheckpointStates() {
		if s.Forkable() && !s.CanBecome(core.CheckpointDeleted) {
			t.Errorf("checkpoint state %s cannot be deleted", s)
		}
	}
	if core.WorkspaceState("").CanBecome(core.WorkspaceReady) || core.OperationState("x").Done() {
		t.Error("what is no state has a transition")
	}
}

func TestResourcesAndNames(t *testing.T) {
	t.Parallel()
	ok := core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}
	if err := ok.Validate(); err != nil {
		t.Error(err)
	}
	for _, r := range []core.Resources{{0, 512, 1}, {65, 512, 1}, {1, 126, 1}, {1, 513, 1}, {1, 512, 0}, {1, 512, 1025}} {
		if err := r.Validate(); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%+v: %v", r, err)
		}
	}
	for name, good := range map[string]bool{
		"a": true, "a-b": true, strings.Repeat("a", 63): true,
		"": false, "-a": false, "a-": false, "A": false, "a_b": false, "a.b": false, strings.Repeat("a", 64): false, "a\n": false, "ä": false,
	} {
		if err := core.ValidateName("name", name); (err == nil) != good {
			t.Errorf("ValidateName(%q) = %v", name, err)
		}
	}
}

func TestClip(t *testing.T) {
	t.Parallel()
	if got := core.Clip("a\x1b[31m\x00\n" + strings.Repeat("x", 200)); strings.ContainsAny(got, "\x1b\x00\n") || len(got) > 130 {
		t.Errorf("Clip = %q", got)
	}
}

func TestStopwatch(t *testing.T) {
	t.Parallel()
	w := core.NewStopwatch()
	w.Add("elsewhere", 1500*time.Microsecond)
	w.Lap("here")
	got := w.Timings()
	if len(got) != 2 || got[1].Stage != "here" || got[1].DurationMS < 0 {
		t.Fatalf("Timings = %+v", got)
	}
	if diff := cmp.Diff(core.Timing{Stage: "elsewhere", DurationMS: 1.5}, got[0]); diff != "" {
		t.Error(diff)
	}
}
