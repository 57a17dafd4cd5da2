package vmmtest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/runner/memory"
)

func testPauseStops(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	p := newProbe(t, m)
	for range 3 {
		p.moves(t)
		m.pause(t)
		p.standsStill(t)
		m.save(t, w.path())
		p.standsStill(t)
		m.resume(t)
	}
	p.moves(t)

	restored := w.restored(t, m.capture(t))
	probe := *p
	region, err := restored.Memory()
	if err != nil {
		t.Fatal(err)
	}
	probe.mem, probe.region = open(t, fmt.Sprintf("/proc/%d/mem", region.PID), os.O_RDONLY), region
	probe.standsStill(t)
	restored.resume(t)
	probe.moves(t)
}

// testStop: a stopped machine stands still, goes on unchanged when it is continued or recovered, and can be ended meanwhile.
func testStop(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	p := newProbe(t, m)
	for range 2 {
		must(t, m.Stop())
		must(t, m.Stop())
		p.stops(t)
		must(t, m.Continue())
		must(t, m.Continue())
		p.moves(t)
	}
	m.want(t, "2", "inc")
	must(t, m.Stop())
	m = m.recovered(t)
	p.moves(t)
	m.want(t, "3", "inc")
	m.pause(t)
	must(t, m.Stop())
	must(t, m.Continue())
	p.standsStill(t)
	m.resume(t)
	must(t, m.Stop())
	promptly(t, "the kill of a stopped machine", func() { m.kill(t) })
	m.allGone(t)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func testRegion(t *testing.T, w *world) {
	t.Helper()
	m := w.restored(t, w.template)
	r, err := m.Memory()
	if err != nil {
		t.Fatal(err)
	}
	if want := int64(w.MemoryMiB) << 20; r.Size != want {
		t.Errorf("the region is %+v, want %d bytes", r, want)
	}
	again, err := m.Memory()
	if diff := cmp.Diff(r, again); diff != "" || err != nil {
		t.Errorf("the region is another the second time (%v):\n%s", err, diff)
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", r.PID))
	if err != nil {
		t.Fatal(err)
	}
	var end int64
	for _, p := range r.Parts {
		if p.Offset != end || p.Addr%memory.PageSize != 0 || p.Size%memory.PageSize != 0 {
			t.Errorf("the region is %+v, want parts that follow each other, of whole pages", r)
		}
		end = p.Offset + p.Size
		want := fmt.Sprintf("%x-%x rw-p ", p.Addr, p.Addr+uint64(p.Size))
		if !strings.Contains(string(maps), want) {
			t.Errorf("the address space has no mapping %q", want)
		}
	}
	if end != r.Size {
		t.Errorf("the parts of the region %+v have %d bytes", r, end)
	}
	private, err := memory.Scan(r)
	if err != nil {
		t.Fatal(err)
	}
	if n := memory.TotalBytes(private); n > r.Size/100 {
		t.Errorf("%d of %d bytes are private right after a restore", n, r.Size)
	}
	// A page that is written there becomes private: BaseUnchanged checks the base at the end.
	f := open(t, fmt.Sprintf("/proc/%d/mem", r.PID), os.O_RDWR)
	if _, err := f.WriteAt([]byte("written from outside"), int64(r.Addr(r.Size/2))); err != nil {
		t.Fatal(err)
	}
	more, err := memory.Scan(r)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := memory.TotalBytes(more), memory.TotalBytes(private)+memory.PageSize; got != want {
		t.Errorf("%d bytes are private after a page was written, want %d", got, want)
	}
}

// facts returns the guest's state, without its clock.
func (m *machine) facts(t *testing.T) string {
	t.Helper()
	list := make([]string, 0, 4)
	for _, q := range []string{"count", "sum", fmt.Sprintf("read %d 0", ownDisk), fmt.Sprintf("read %d 8200", ownDisk)} {
		list = append(list, q+"="+m.ask(t, q))
	}
	return strings.Join(list, " ")
}

func (m *machine) wantFacts(t *testing.T, who, want string) {
	t.Helper()
	if got := m.facts(t); got != want {
		t.Errorf("%s has %s, want %s", who, got, want)
	}
}

func testForkEquals(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	m.want(t, "2", "inc")
	m.ask(t, "fill 1")
	m.want(t, "ok", fmt.Sprintf("write %d 8200 4711", ownDisk))
	want := m.facts(t)
	ticks := number(t, m.ask(t, "ticks"))
	s := m.capture(t)
	child := w.fork(t, s)
	child.wantFacts(t, "the child", want)
	if now := number(t, child.ask(t, "ticks")); now < ticks {
		t.Errorf("the child's clock says %d, the parent's said %d", now, ticks)
	}
	m.wantFacts(t, "the parent", want)
}

func testIsolation(t *testing.T, w *world) {
	t.Helper()
	parent := w.fork(t, w.template)
	s := parent.capture(t)
	before := parent.facts(t)

	parent.want(t, "2", "inc")
	parent.ask(t, "fill 1")
	parent.want(t, "ok", fmt.Sprintf("write %d 8200 1", ownDisk))
	after := parent.facts(t)

	first := w.fork(t, s)
	first.wantFacts(t, "a child made after its parent has written", before)
	for range 3 {
		first.ask(t, "inc")
	}
	first.want(t, "ok", fmt.Sprintf("write %d 8200 2", ownDisk))

	second := w.fork(t, s)
	second.wantFacts(t, "a child made after its sibling has written", before)
	parent.wantFacts(t, "the parent of children that have written", after)
	if got, err := parent.try(t.Context(), fmt.Sprintf("write %d 0 1", rootDisk)); err == nil {
		t.Errorf("a read-only disk was written (%s)", got)
	}
}

// testClockGoesOn: CLOCK_MONOTONIC of a fork continues from the capture, however long ago that was. So timers of the
// guest do not all expire at once.
func testClockGoesOn(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	m.want(t, "2", "inc")
	s := m.capture(t)
	was := number(t, m.ask(t, "uptime")) // not less than at the capture
	m.kill(t)
	const age = 20 * time.Second
	pause(t, age)
	child := w.restored(t, s)
	before := time.Now()
	child.resume(t)
	now := number(t, child.ask(t, "uptime"))
	ran := time.Since(before).Milliseconds()
	if ahead := now - was - ran; ahead > age.Milliseconds()/2 {
		t.Errorf("the clock of a fork of a capture that is %s old is at %d ms after %d ms, and was at most at %d ms", age, now, ran, was)
	}
	if now > was+ran+1000 {
		t.Logf("the clock went on by %d ms in %d ms", now-was, ran)
	}
}

func testGenerations(t *testing.T, w *world) {
	t.Helper()
	type generation struct {
		s     *snapshot
		facts string
	}
	var line []generation
	from := w.template
	for i := range 3 {
		m := w.fork(t, from)
		m.want(t, fmt.Sprint(i+2), "inc")
		if i < 2 {
			m.ask(t, "fill 1")
		}
		m.want(t, "ok", fmt.Sprintf("write %d 8200 %d", ownDisk, i+100))
		g := generation{facts: m.facts(t), s: m.capture(t)}
		if i == 1 { // a base made of base and delta must give the same
			g.s.rebase(t, w)
		}
		line = append(line, g)
		from = g.s
		m.kill(t)
	}
	for i, g := range line {
		w.fork(t, g.s).wantFacts(t, fmt.Sprintf("a fork of generation %d", i+1), g.facts)
	}
}

func testForksAtOnce(t *testing.T, w *world) {
	t.Helper()
	const n = 8
	m := w.fork(t, w.template)
	m.want(t, "2", "inc")
	s := m.capture(t)
	m.kill(t)
	// All of them read the device state from one open file.
	restore := s.restoreSpec(t)
	shells := make([]*machine, n)
	for i := range shells {
		shells[i] = w.shell(t, s)
	}
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i, shell := range shells {
		wg.Go(func() {
			errs[i] = func() error {
				if err := shell.Restore(t.Context(), restore); err != nil {
					return err
				}
				if err := shell.Resume(t.Context()); err != nil {
					return err
				}
				for j := range i {
					got, err := shell.try(t.Context(), "inc")
					if want := fmt.Sprint(j + 3); err != nil || got != want {
						return fmt.Errorf("fork %d counts %q, want %q (%w)", i, got, want, err)
					}
				}
				_, err := shell.try(t.Context(), fmt.Sprintf("write %d 0 %d", ownDisk, i))
				return err
			}()
		})
	}
	wg.Wait()
	for i, shell := range shells {
		if errs[i] != nil {
			t.Error(errs[i])
			continue
		}
		shell.want(t, fmt.Sprint(i+2), "count")
		shell.want(t, fmt.Sprint(i), fmt.Sprintf("read %d 0", ownDisk))
	}
}

// gone fails if the process of a killed machine still exists.
func gone(t *testing.T, m *machine) {
	t.Helper()
	if pid := m.Handle().PID; pid != os.Getpid() {
		// A machine that was recovered may see its end before the process's parent, this process, has reaped it.
		eventually(t, fmt.Sprintf("process %d is gone", pid), func() bool { return unix.Kill(pid, 0) != nil })
		if pids := processesOf(t, m.spec.ID); len(pids) > 0 {
			t.Errorf("the processes %v are left", pids)
		}
	}
	if _, err := os.Stat(filepath.Dir(m.spec.Dir)); err != nil {
		t.Error(err)
	}
}
