package daemon_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/daemon"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestCheckStoreData reads what a runner has sealed: all of it in parts, and what was changed or taken away is named with what needs it.
func TestCheckStoreData(t *testing.T) {
	t.Parallel()
	files := t.TempDir()
	store := daemon.StoreConfig{URL: "dir:" + files}
	c := newClusterOf(t, func(cfg *daemon.ControllerConfig) { cfg.Store = store })
	c.join(func(rc *daemon.RunnerConfig) { rc.Store = store })
	ws := create(t, c.client)
	var last string
	for _, text := range []string{"one", "two", "three"} {
		if _, err := c.client.WriteFile(t.Context(), ws.ID, "/note", strings.NewReader(text), coppice.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
		cp := sealedCheckpoint(t, c.client, ws.ID)
		last = cp.ID
	}
	read := func(which, of int) (sum coppice.StoreData) {
		t.Helper()
		for next := ""; ; next = sum.Next {
			page, err := c.client.CheckStoreData(t.Context(), coppice.StorePart{Which: which, Of: of}, next)
			if err != nil {
				t.Fatal(err)
			}
			page.Checkpoints += sum.Checkpoints
			page.Frames += sum.Frames
			page.Problems = append(sum.Problems, page.Problems...)
			if sum = page; sum.Next == "" {
				return sum
			}
		}
	}
	whole, parts := read(1, 1), int64(0)
	for i := range 3 {
		part := read(i+1, 3)
		if parts += part.Frames; part.Checkpoints != 4 {
			t.Errorf("%+v", part)
		}
	}
	if whole.Checkpoints != 4 || whole.Frames == 0 || parts != whole.Frames || len(whole.Problems) > 0 { // and the template
		t.Fatalf("%+v; %d frames in parts", whole, parts)
	}
	for name, x := range map[string]struct {
		object string
		code   string
		change func(path string, b []byte) error
	}{
		"changed":  {"v1/*/" + last + "/*/pack-0", "CHECKPOINT_CORRUPT", func(path string, b []byte) error { b[len(b)/2] ^= 1; return os.WriteFile(path, b, 0o600) }},
		"gone":     {"v1/*/" + last + "/*/pack-0", "CHECKPOINT_INCOMPLETE", func(path string, _ []byte) error { return os.Remove(path) }},
		"manifest": {"v1/*/" + last + "/*/manifest", "CHECKPOINT_CORRUPT", func(path string, b []byte) error { b[len(b)/2] ^= 1; return os.WriteFile(path, b, 0o600) }},
	} {
		paths, err := filepath.Glob(filepath.Join(files, x.object))
		if err != nil || len(paths) != 1 {
			t.Fatalf("%s: %q, %v", name, paths, err)
		}
		b, err := os.ReadFile(paths[0])
		if err != nil {
			t.Fatal(err)
		}
		was := string(b)
		if err := x.change(paths[0], b); err != nil {
			t.Fatal(err)
		}
		got := read(1, 1)
		if len(got.Problems) != 1 || !strings.HasSuffix(paths[0], got.Problems[0].Object) || got.Problems[0].Code != x.code || got.Problems[0].NeededBy != 1 || got.Problems[0].Checkpoints[0] != last {
			t.Errorf("%s: %+v", name, got)
		}
		if err := os.WriteFile(paths[0], []byte(was), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
