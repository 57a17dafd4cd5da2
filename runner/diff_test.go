package runner

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/fakeguest"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
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

// TestDiffOfIdentityFiles: simulated guests are resealed, programs write to files with their identity, and the comparison lists these files, in
// their place among the disk's and on any page. It does not list what a reseal wrote. A guest with an old agent is said to have told nothing.
func TestDiffOfIdentityFiles(t *testing.T) {
	t.Parallel()
	s := newShelf(t)
	guest := newResealedGuest(t, "first")
	survey := func(g *resealedGuest) *checkpoints.Survey {
		seen := checkpoints.SurveyOf(g.quiesce())
		seen.DiskFlushed = true
		return &seen
	}
	before := s.put(1, "etc", unchanged, survey(guest))
	other := s.put(1, "zoo", unchanged, survey(guest.fork("second")))
	guest.write("/etc/hosts", "127.0.0.1\tlocalhost\n10.0.0.5\tdb first\n")
	guest.write("/etc/resolv.conf", "nameserver 192.0.2.1\n")
	after := s.put(1, "zoo", unchanged, survey(guest))
	fork := guest.fork("third")
	child := s.put(1, "zoo", unchanged, survey(fork))
	fork.write("/etc/hostname", "mine\n")
	renamed := s.put(1, "zoo", unchanged, survey(fork))
	fork.lacks(fakeguest.LacksIdentityFiles)
	old := s.put(1, "zoo", unchanged, survey(fork))
	long := survey(guest)
	long.IdentityFiles[1] = guestapi.IdentityFile{Path: "/etc/hosts", Size: 1 << 20} // as an agent reports a file that is too large
	large := s.put(1, "zoo", unchanged, long)
	forged := survey(guest)
	forged.IdentityFiles = append(forged.IdentityFiles, guestapi.IdentityFile{Path: "/etc/shadow", SHA256: "1"}, guestapi.IdentityFile{Path: "/etc/hosts", SHA256: "2"})
	hostile := s.put(1, "zoo", unchanged, forged)
	s.open()
	written := []string{"changed /etc", "changed /etc/hosts in memory", "added /etc/passwd", "changed /etc/resolv.conf in memory", "added /zoo"}
	for _, tc := range []struct {
		name     string
		from, to core.CheckpointID
		complete bool
		want     []string
	}{
		{"a fork", before, other, true, []string{"changed /etc", "added /etc/passwd", "added /zoo"}},
		{"written", before, after, true, written},
		{"a fork of what was written", after, child, true, nil},
		{"written back", after, other, true, []string{"changed /etc/hosts in memory", "changed /etc/resolv.conf in memory"}},
		{"renamed", child, renamed, true, []string{"changed /etc/hostname in memory"}},
		{"an old agent", child, old, false, nil},
		{"a large file", after, large, true, []string{"changed /etc/hosts in memory"}},
		{"two large files", large, large, false, nil},
		{"other paths", after, hostile, true, nil},
	} {
		for _, limit := range []int{1, 2, 100} {
			var got []string
			complete := true
			for after := []byte(nil); ; {
				p, err := s.Diff(t.Context(), tc.from, runnerapi.Diff{To: tc.to, After: after, Limit: limit})
				if err != nil {
					t.Fatal(err)
				}
				if len(p.Files) > limit {
					t.Errorf("%s: a page of %d has %d", tc.name, limit, len(p.Files))
				}
				complete = complete && p.IdentityComplete
				for _, f := range p.Files {
					line := f.Change + " " + string(f.Path)
					if f.InMemory {
						line += " in memory"
					}
					got = append(got, line)
				}
				if after = p.Next; len(after) == 0 {
					break
				}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" || complete != tc.complete {
				t.Errorf("%s, pages of %d, complete: %t\n%s", tc.name, limit, complete, diff)
			}
		}
	}
}

// resealedGuest is a simulated guest that was resealed under a name, and runs.
type resealedGuest struct {
	t     *testing.T
	state *fakeguest.State
	c     *guesttest.Client
}

func newResealedGuest(t *testing.T, name string) *resealedGuest {
	t.Helper()
	g := &resealedGuest{t: t, state: fakeguest.NewState()}
	g.c = guesttest.NewClient(t, fakeguest.New(fakeguest.InProcess(g.state), nil))
	return g.fork(name)
}

func (g *resealedGuest) ask(path string, in any) {
	g.t.Helper()
	if _, err := guesttest.Ask[json.RawMessage](g.c, http.MethodPost, path, in); err != nil {
		g.t.Fatal(err)
	}
}

// quiesce reports the guest at a capture, which is undone.
func (g *resealedGuest) quiesce() guestapi.QuiesceResponse {
	g.t.Helper()
	id := string(core.NewID[core.CheckpointID]())
	out, err := guesttest.Ask[guestapi.QuiesceResponse](g.c, http.MethodPost, guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: id})
	if err != nil {
		g.t.Fatal(err)
	}
	g.ask(guestapi.PathReseed, guestapi.ReseedRequest{Entropy: guesttest.Entropy(), Generation: out.Generation})
	g.ask(guestapi.PathRelease, guestapi.ReleaseRequest{Generation: out.Generation})
	return out
}

// fork returns a clone that was resealed under a name.
func (g *resealedGuest) fork(name string) *resealedGuest {
	g.t.Helper()
	f := &resealedGuest{t: g.t, state: g.state.Clone()}
	f.c = guesttest.NewClient(g.t, fakeguest.New(fakeguest.InProcess(f.state), nil))
	f.ask(guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: string(core.NewID[core.CheckpointID]())})
	req := guesttest.ResealRequest(name)
	req.Identity.Hostname = name
	f.ask(guestapi.PathReseal, req)
	f.ask(guestapi.PathRelease, guestapi.ReleaseRequest{Generation: req.Identity.Generation})
	return f
}

func (g *resealedGuest) write(path, content string) {
	g.state.Files[path] = fakeguest.File{Data: []byte(content)}
}

func (g *resealedGuest) lacks(what string) { g.state.Lacks = append(g.state.Lacks, what) }

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
