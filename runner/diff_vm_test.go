package runner

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// diff collects the pages of a comparison; its files are lines.
func (r *rig) diff(from, to core.CheckpointID, limit int) (runnerapi.DiffPage, []string) {
	r.t.Helper()
	var first runnerapi.DiffPage
	lines := []string{}
	for after := []byte(nil); ; {
		p, err := r.Diff(r.t.Context(), from, runnerapi.Diff{To: to, After: after, Limit: limit})
		if err != nil {
			r.t.Fatal(err)
		}
		if after == nil {
			first = p
		}
		if !p.Complete || p.Unreadable > 0 {
			r.t.Errorf("complete %t, unreadable %d", p.Complete, p.Unreadable)
		}
		for _, f := range p.Files {
			line := fmt.Sprintf("%s %s %s", f.Change, f.Type, f.Path)
			if len(f.What) > 0 {
				line += " " + strings.Join(f.What, ",")
			}
			lines = append(lines, line)
		}
		if after = p.Next; len(after) == 0 {
			return first, lines
		}
	}
}

// TestDiff: between two checkpoints a real guest writes, renames and removes files of the image and of its own, and starts and ends
// processes. The comparison says that and nothing else, whichever pages it is asked for, and also across a rebase and a fork.
func TestDiff(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Rebase.Off, c.FlushTimeout = true, 30*time.Second })
	template := r.template()
	id := r.fork(template)
	r.sh(id, `mkdir -p own/sub; echo one > own/one; echo two > own/two; echo x > own/sub/x; dd if=/dev/zero of=own/big bs=1M count=3 2>/dev/null
		sleep 1111 >/dev/null 2>&1 & echo $! > own/pid; sleep 2222 >/dev/null 2>&1 &`)
	a := r.capture(id)
	r.sh(id, `echo new > own/new; echo ONE > own/one; rm own/two; mv own/sub own/moved; chmod 600 /etc/passwd; ln -s one own/link
		rm -r /usr/share/doc/adduser; mv /etc/skel /etc/skeleton; printf x | dd of=own/big bs=1 seek=2000000 conv=notrunc 2>/dev/null
		kill $(cat own/pid); sleep 3333 >/dev/null 2>&1 &`)
	b := r.capture(id)
	doc := "removed dir /usr/share/doc/adduser"
	page, got := r.diff(a.ID, b.ID, 10_000)
	want := []string{
		"changed file /etc/passwd mode", "removed dir /etc/skel", "added dir /etc/skeleton", "changed file /root/own/big content,mtime",
		"added symlink /root/own/link", "added dir /root/own/moved", "added file /root/own/moved/x", "added file /root/own/new",
		"changed file /root/own/one content,mtime", "removed dir /root/own/sub", "removed file /root/own/sub/x", "removed file /root/own/two", doc,
	}
	below := func(line string) bool { // the image's own files in what was removed or moved whole
		_, path, _ := strings.Cut(line, "/")
		return strings.HasPrefix(path, "usr/share/doc/adduser/") || strings.HasPrefix(path, "etc/skel/") || strings.HasPrefix(path, "etc/skeleton/")
	}
	if diff := cmp.Diff(want, slices.DeleteFunc(slices.Clone(got), below)); diff != "" {
		t.Error(diff)
	}
	var removed, moved, came int
	for _, line := range got {
		removed += strings.Count(line, "removed file /usr/share/doc/adduser/")
		moved += strings.Count(line, "removed file /etc/skel/")
		came += strings.Count(line, "added file /etc/skeleton/")
	}
	if removed == 0 || moved == 0 || moved != came {
		t.Errorf("%d documents are gone, %d files left /etc/skel and %d came to /etc/skeleton", removed, moved, came)
	}
	if _, small := r.diff(a.ID, b.ID, 3); !slices.Equal(small, got) {
		t.Errorf("in small pages: %s", cmp.Diff(got, small))
	}
	r.checkProcesses(page.Processes)
	if m := *page.MemoryBytes; m < 100<<10 || m > b.DeltaBytes+a.DeltaBytes {
		t.Errorf("%d bytes of memory changed; the deltas have %d and %d", m, a.DeltaBytes, b.DeltaBytes)
	}
	if same, none := r.diff(b.ID, b.ID, 10); len(none) > 0 || *same.MemoryBytes != 0 || len(same.Processes.Started)+len(same.Processes.Gone) > 0 {
		t.Errorf("a checkpoint differs from itself: %q, %+v", none, same)
	}
	before := *page.MemoryBytes
	if err := r.Rebase(b.ID); err != nil {
		t.Fatal(err)
	}
	if rebased, _ := r.diff(a.ID, b.ID, 10_000); *rebased.MemoryBytes != before {
		t.Errorf("after a rebase %d bytes of memory differ, before %d", *rebased.MemoryBytes, before)
	}
	child := r.forkLarger(b.ID)
	r.sh(child, "echo child > own/child")
	c := r.capture(child)
	if _, got := r.diff(b.ID, c.ID, 1000); !slices.Contains(got, "added file /root/own/child") || slices.ContainsFunc(got, func(l string) bool { return strings.Contains(l, "own/") && !strings.HasSuffix(l, "own/child") }) {
		t.Errorf("a fork's checkpoint: %q", got)
	}
	if _, err := r.Diff(t.Context(), a.ID, runnerapi.Diff{To: "ckpt_absent", Limit: 1}); core.CodeOf(err) != core.CodeCheckpointNotFound {
		t.Errorf("got %v", err)
	}
	r.measureDiff(id)
	r.measureFlush(id)
}

// measureFlush prints what a capture pays for the flush of a guest that has written little.
func (r *rig) measureFlush(id core.SandboxID) {
	r.t.Helper()
	for i := range 2 {
		if i%2 == 1 {
			r.sh(id, "echo $$ > written")
		}
		c := r.capture(id)
		seen, known, err := r.checkpoints.Survey(c.ID)
		if err != nil || !known || !seen.DiskFlushed {
			r.t.Fatalf("%+v, %t, %v", seen, known, err)
		}
		r.t.Logf("files written: %d; in the freeze %.1f ms of a pause of %.1f; %v", i%2, seen.FlushMS, c.PauseMS, c.Timings)
	}
}

// forkLarger forks a child on a disk of twice the size.
func (r *rig) forkLarger(id core.CheckpointID) core.SandboxID {
	r.t.Helper()
	child := r.child()
	child.DiskGiB = 2
	f, err := r.Fork(r.t.Context(), runnerapi.Fork{CheckpointID: id, Children: []runnerapi.Child{child}})
	if err != nil || f.Children[0].Problem != nil {
		r.t.Fatal(err, f)
	}
	return child.SandboxID
}

func (r *rig) checkProcesses(p *runnerapi.ProcessDiff) {
	r.t.Helper()
	if p == nil || !p.Complete {
		r.t.Fatalf("processes: %+v", p)
	}
	args := func(list []core.WorkloadProcess) (out []string) {
		for _, p := range list {
			out = append(out, p.Command+": "+p.Args)
		}
		return out
	}
	if diff := cmp.Diff([]string{"sleep: sleep 3333"}, args(p.Started)); diff != "" {
		r.t.Errorf("started: %s", diff)
	}
	if diff := cmp.Diff([]string{"sleep: sleep 1111"}, args(p.Gone)); diff != "" {
		r.t.Errorf("gone: %s", diff)
	}
}

// measureDiff prints how long comparisons take: of a small change, and of one beside 20,000 files, or 2,000 without -long. An emulated
// machine needs most of a minute to write 20,000.
func (r *rig) measureDiff(id core.SandboxID) {
	r.t.Helper()
	dirs := 10
	if *long {
		dirs = 100
	}
	files := dirs * 200
	r.sh(id, fmt.Sprintf("mkdir many; cd many; for d in $(seq %d); do mkdir $d; for i in $(seq 200); do echo $i > $d/$i; done; done", dirs))
	many := r.capture(id)
	r.sh(id, "echo changed > many/5/100")
	last := r.capture(id)
	measure := func(from, to core.CheckpointID) (time.Duration, int) {
		start := time.Now()
		_, lines := r.diff(from, to, files/2) // in more than one page
		return time.Since(start), len(lines)
	}
	for _, stage := range many.Timings {
		r.t.Logf("capture with %d new files: %s %s ms", files, stage.Stage, strconv.FormatFloat(stage.DurationMS, 'f', 1, 64))
	}
	took, n := measure(many.ID, last.ID)
	if n != 1 {
		r.t.Errorf("%d files changed, want 1", n)
	}
	r.t.Logf("one change beside %d files: %v", files, took)
	took, n = measure(many.Parent, many.ID)
	if n < files+dirs {
		r.t.Errorf("%d files came, want %d", n, files+dirs)
	}
	r.t.Logf("%d new files: %v", n, took)
}
