package runner

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/compare"
	"github.com/coppice-dev/coppice/runner/ext4/ext4test"
	"github.com/coppice-dev/coppice/runner/lease"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/roots"
)

// shelf is a runner that has checkpoints and nothing else, so that comparing them needs no machine.
type shelf struct {
	*Runner
	t     *testing.T
	image core.Digest
	stop  context.CancelFunc
}

const shelfMemory = 1 << 20 // of each machine

func newShelf(t *testing.T) *shelf {
	t.Helper()
	mkfs := require.Program(t, "mkfs.erofs", "erofs-utils")
	dir := t.TempDir()
	none, err := images.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s := &shelf{Runner: &Runner{cfg: Config{DataDir: dir, Images: none, Log: slog.New(slog.DiscardHandler)}.withDefaults()}, t: t, image: core.Digest("sha256:" + strings.Repeat("a", 64))}
	s.runCtx, s.stop = context.WithCancel(t.Context())
	t.Cleanup(s.stop)
	if s.lease, err = lease.Open(lease.Config{DataDir: dir, RunDir: t.TempDir(), Default: s.cfg.Lease}); err != nil {
		t.Fatal(err)
	}
	if s.lazy, err = openLazy(s.Runner); err != nil {
		t.Fatal(err)
	}
	if s.roots, err = openRoots(s.Runner); err != nil {
		t.Fatal(err)
	}
	from := filepath.Join(dir, "from")
	err = errors.Join(os.MkdirAll(filepath.Join(from, "etc"), 0o755), os.WriteFile(filepath.Join(from, "etc", "passwd"), []byte("root"), 0o644))
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), mkfs, "--quiet", s.roots.Path(roots.Own(s.image)), from).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.erofs: %v: %s", err, out)
	}
	return s
}

// put makes a checkpoint: its memory is one byte again and again, its disk has one file.
func (s *shelf) put(fill byte, name string, change func(rec *checkpoints.Record), seen *checkpoints.Survey) core.CheckpointID {
	s.t.Helper()
	rec := &checkpoints.Record{Checkpoint: runnerapi.Checkpoint{
		ID: core.NewID[core.CheckpointID](), Image: s.image, Base: core.NewID[core.BaseID](), Resources: core.Resources{MemoryMiB: shelfMemory >> 20},
	}}
	change(rec)
	dir := filepath.Join(s.cfg.DataDir, "checkpoints", string(rec.ID))
	b, err := json.Marshal(rec)
	from := filepath.Join(s.t.TempDir(), "from")
	err = errors.Join(err,
		os.MkdirAll(dir, 0o700), os.MkdirAll(filepath.Join(s.cfg.DataDir, "bases"), 0o700), os.MkdirAll(filepath.Join(from, "upper"), 0o755),
		os.WriteFile(filepath.Join(dir, checkpoints.RecordFile), b, 0o600), os.WriteFile(filepath.Join(dir, checkpoints.StateFile), nil, 0o600),
		os.WriteFile(filepath.Join(s.cfg.DataDir, "bases", string(rec.Base)+".ram"), bytes.Repeat([]byte{fill}, rec.Resources.MemoryMiB<<20), 0o600),
		os.WriteFile(filepath.Join(from, "upper", name), nil, 0o644),
		os.Chtimes(filepath.Join(from, "upper", name), time.Unix(1, 0), time.Unix(1, 0)), // the same file each time
	)
	if seen != nil {
		err = errors.Join(err, seen.Write(dir))
	}
	if err != nil {
		s.t.Fatal(err)
	}
	ext4test.Make(s.t, filepath.Join(dir, checkpoints.OverlayFile), 16<<20, from)
	return rec.ID
}

// open reads what was put.
func (s *shelf) open() {
	s.t.Helper()
	var err error
	if s.bases, err = memory.NewBaseStore(filepath.Join(s.cfg.DataDir, "bases"), true); err == nil {
		s.checkpoints, err = openCheckpoints(s.Runner, nil)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	s.compare = newComparer(s.Runner)
}

func unchanged(*checkpoints.Record) {}

func TestDiffOfStoredCheckpoints(t *testing.T) {
	t.Parallel()
	s := newShelf(t)
	stays, goes, comes := core.WorkloadProcess{PID: 1, StartTicks: 1, Command: "init"}, core.WorkloadProcess{PID: 2, StartTicks: 5, Command: "sh"}, core.WorkloadProcess{PID: 2, StartTicks: 5, Command: "cat"}
	a := s.put(1, "one", unchanged, &checkpoints.Survey{DiskFlushed: true, Processes: []core.WorkloadProcess{stays, goes}})
	b := s.put(2, "two", unchanged, &checkpoints.Survey{DiskFlushed: true, Processes: []core.WorkloadProcess{stays, comes}})
	same := s.put(2, "two", unchanged, &checkpoints.Survey{DiskFlushed: true, Truncated: true})
	unflushed := s.put(2, "two", unchanged, &checkpoints.Survey{})
	old := s.put(2, "two", unchanged, nil)
	s.open()
	diff := func(from, to core.CheckpointID, after string) runnerapi.DiffPage {
		t.Helper()
		p, err := s.Diff(t.Context(), from, runnerapi.Diff{To: to, After: []byte(after), Limit: 1})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	all := int64(shelfMemory)
	want := runnerapi.DiffPage{
		Files: []runnerapi.FileChange{{Path: []byte("/one"), Change: "removed", Type: "file"}}, Next: []byte("/one"), Complete: true, MemoryBytes: &all,
		Processes: &runnerapi.ProcessDiff{Complete: true, Started: []core.WorkloadProcess{comes}, Gone: []core.WorkloadProcess{goes}},
	}
	if d := cmp.Diff(want, diff(a, b, "")); d != "" {
		t.Error(d)
	}
	want = runnerapi.DiffPage{Files: []runnerapi.FileChange{{Path: []byte("/two"), Change: "added", Type: "file"}}, Next: []byte("/two"), Complete: true}
	if d := cmp.Diff(want, diff(a, b, "/one")); d != "" {
		t.Error(d)
	}
	if p := diff(a, b, "/two"); len(p.Files) > 0 || len(p.Next) > 0 {
		t.Errorf("behind the last: %+v", p)
	}
	if p := diff(b, same, ""); *p.MemoryBytes != 0 || len(p.Files) > 0 || p.Processes.Complete || !p.Complete {
		t.Errorf("%+v", p)
	}
	if p := diff(b, unflushed, ""); p.Complete || !p.Processes.Complete {
		t.Errorf("a disk that was not flushed: %+v", p)
	}
	if p := diff(b, old, ""); p.Complete || p.Processes.Complete {
		t.Errorf("a checkpoint of an earlier version: %+v", p)
	}
}

func TestDiffRefuses(t *testing.T) {
	t.Parallel()
	s := newShelf(t)
	a := s.put(1, "one", unchanged, nil)
	otherImage := s.put(1, "one", func(r *checkpoints.Record) { r.Image = core.Digest("sha256:" + strings.Repeat("b", 64)) }, nil)
	otherSize := s.put(1, "one", func(r *checkpoints.Record) { r.Resources.MemoryMiB = 2 }, nil)
	overwritten, withoutBase, odd := s.put(1, "one", unchanged, nil), s.put(1, "one", unchanged, nil), s.put(1, "one", unchanged, nil)
	s.open()
	base, err := s.checkpoints.Get(withoutBase)
	if err := errors.Join(err,
		os.WriteFile(s.checkpoints.Path(overwritten, checkpoints.OverlayFile), make([]byte, 1<<20), 0o600),
		os.Remove(filepath.Join(s.cfg.DataDir, "bases", string(base.Base)+".ram")),
		os.WriteFile(s.checkpoints.Path(odd, checkpoints.SurveyFile), []byte("{"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	for name, x := range map[string]struct {
		req  runnerapi.Diff
		want core.Code
	}{
		"no limit":             {runnerapi.Diff{To: a}, core.CodeInvalidField},
		"too many":             {runnerapi.Diff{To: a, Limit: runnerapi.MaxDiffFiles + 1}, core.CodeInvalidField},
		"an absent checkpoint": {runnerapi.Diff{To: "ckpt_absent", Limit: 1}, core.CodeCheckpointNotFound},
		"another image":        {runnerapi.Diff{To: otherImage, Limit: 1}, core.CodeInvalidField},
		"another machine":      {runnerapi.Diff{To: otherSize, Limit: 1}, core.CodeInvalidField},
		"an overwritten disk":  {runnerapi.Diff{To: overwritten, Limit: 1}, core.CodeDiskUnreadable},
		"a lost base":          {runnerapi.Diff{To: withoutBase, Limit: 1}, core.CodeCheckpointCorrupt},
		"a damaged survey":     {runnerapi.Diff{To: odd, Limit: 1}, core.CodeCheckpointCorrupt},
	} {
		if _, err := s.Diff(t.Context(), a, x.req); core.CodeOf(err) != x.want {
			t.Errorf("%s: %v, want %s", name, err, x.want)
		}
	}
	for range compare.MaxComparisons {
		if _, err := s.compare.Acquire(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Diff(ctx, a, runnerapi.Diff{To: a, Limit: 1}); core.CodeOf(err) != core.CodeCanceled {
		t.Errorf("a caller that left the queue: %v", err)
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := s.Diff(t.Context(), a, runnerapi.Diff{To: a, Limit: 1})
		waiting <- err
	}()
	s.stop()
	if err := <-waiting; core.CodeOf(err) != core.CodeRunnerUnreachable {
		t.Errorf("in a runner that stops: %v", err)
	}
}
