package host

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// denial is a flow of the sandbox sbx_1 that was denied.
func denial(n int, host, reason string) core.Flow {
	return core.Flow{
		ID: fmt.Sprint("f", n), SandboxID: "sbx_1", Epoch: 1, At: time.Now().UTC(), Spoken: core.SpokenHTTP, Host: host, Port: 80, Method: "GET", Path: "/", Outcome: core.FlowDenied, Reason: reason,
	}
}

// sum adds up the reported flows, by host.
func sum(list []core.Flow) (all int64, by map[string]int64) {
	by = map[string]int64{}
	for _, f := range list {
		all += f.Flows()
		by[f.Host] += f.Flows()
	}
	return all, by
}

// TestDeniedFlowsAreCounted: a sandbox with many denied flows, to few hosts and to many, gets few records, and they
// count every flow. This is also true when the process is killed in the middle of it.
func TestDeniedFlowsAreCounted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := spoolIn(t, dir, 64<<20)
	d := newDenials(s, time.Hour)
	n := 0
	deny := func(host, reason string) {
		t.Helper()
		n++
		if err := d.Begin(denial(n, host, reason)); err != nil {
			t.Fatal(err)
		}
	}
	for range 5000 {
		deny("a.example", "the policy does not allow it")
		deny("b.example", "the policy does not allow it")
	}
	for i := range 5000 {
		deny(fmt.Sprintf("h%d.example", i), fmt.Sprint("for reason ", i))
	}
	// The process is killed: a new one continues with a copy of what is on the disk.
	copied := t.TempDir()
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	for what, list := range map[string][]core.Flow{
		"killed": reported(t, spoolIn(t, copied, 64<<20)),
		"ended":  func() []core.Flow { d.end(""); return reported(t, s) }(),
	} {
		all, by := sum(list)
		if all != int64(n) || by["a.example"] != 5000 || by["b.example"] != 5000 {
			t.Errorf("%s: %d of %d flows are counted, %d to a, %d to b", what, all, n, by["a.example"], by["b.example"])
		}
		if most := deniedSingly + deniedKinds + 1; len(list) > most {
			t.Errorf("%s: %d records, want at most %d", what, len(list), most)
		}
		for _, f := range list {
			if f.Count > 1 && (f.Last.Before(f.At) || f.Ended != f.Last || f.Outcome != core.FlowDenied) {
				t.Errorf("%s: %+v", what, f)
			}
		}
	}
	if len(s.tallies) != 0 || len(s.slots.used) != 0 || s.reserved != 0 {
		t.Errorf("left: %v, %v, %d bytes reserved", s.tallies, s.slots.used, s.reserved)
	}
}

// TestTalliesEnd: a tally ends when its time is over, and the next flows begin another one. Two records never count the
// same flow.
func TestTalliesEnd(t *testing.T) {
	t.Parallel()
	s := spoolIn(t, t.TempDir(), 64<<20)
	d := newDenials(s, time.Hour)
	for i := range 100 {
		if err := d.Begin(denial(i, "a.example", "no")); err != nil {
			t.Fatal(err)
		}
	}
	d.tidy(time.Now())
	if all, _ := sum(reported(t, s)); all != deniedSingly {
		t.Errorf("%d flows are reported before their time", all)
	}
	d.tidy(time.Now().Add(2 * time.Hour))
	for i := range 3 {
		if err := d.Begin(denial(1000+i, "a.example", "no")); err != nil {
			t.Fatal(err)
		}
	}
	if all, _ := sum(reported(t, s)); all != 100-deniedSingly+3 || len(d.of) != 1 {
		t.Errorf("%d flows are reported of %d", all, 100-deniedSingly+3)
	}
}

// TestTalliesOverSegments: tallies stay exact while segments are created and removed.
func TestTalliesOverSegments(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := spoolIn(t, dir, 64<<20)
	d := newDenials(s, time.Hour)
	for i := range 100 {
		if err := d.Begin(denial(i, "a.example", "no")); err != nil {
			t.Fatal(err)
		}
	}
	for i := 0; len(s.segments) < 3; i++ {
		f := denial(i, "b.example", "")
		f.ID, f.SandboxID, f.Outcome = fmt.Sprint("other", i), "sbx_2", core.FlowAllowed
		if err := s.Begin(f); err != nil {
			t.Fatal(err)
		}
		f.Ended = f.At
		s.End(f)
	}
	reported(t, s)
	for i := range 50 {
		if err := d.Begin(denial(1000+i, "a.example", "no")); err != nil {
			t.Fatal(err)
		}
	}
	copied := t.TempDir()
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	_, by := sum(reported(t, spoolIn(t, copied, 64<<20)))
	if by["a.example"] != 150-deniedSingly {
		t.Errorf("%d flows are reported, want %d", by["a.example"], 150-deniedSingly)
	}
}

// TestManyTallies: when every counter of the host is in use, further kinds of denied flows are refused and counted as
// refused. Existing tallies count on. When a tally has ended, its counter is free again.
func TestManyTallies(t *testing.T) {
	t.Parallel()
	s := spoolIn(t, t.TempDir(), 1<<30)
	d := newDenials(s, time.Hour)
	of := func(sandbox, host int) core.Flow {
		f := denial(sandbox<<8+host, fmt.Sprintf("h%d.example", host), "no")
		f.SandboxID = core.SandboxID(fmt.Sprint("sbx_", sandbox))
		return f
	}
	for range maxSlots - 40 { // in use by other sandboxes
		if _, err := s.slots.take(); err != nil {
			t.Fatal(err)
		}
	}
	for sandbox := range 3 {
		for host := range deniedSingly + deniedKinds {
			_ = d.Begin(of(sandbox, host)) // the last ones find no counter
		}
	}
	if n := len(s.slots.used); n != maxSlots || s.unsaid != 3*deniedKinds-40 {
		t.Fatalf("%d counters are in use, want all %d; %d flows were refused", n, maxSlots, s.unsaid)
	}
	refused := s.unsaid
	for host := range deniedSingly {
		if err := d.Begin(of(3, host)); err != nil {
			t.Errorf("a flow with a record of its own: %v", err)
		}
	}
	if err := d.Begin(of(3, 99)); core.CodeOf(err) != core.CodeDiskFull || s.unsaid != refused+1 {
		t.Errorf("one more: %v, %d flows are refused, were %d", err, s.unsaid, refused)
	}
	if err := d.Begin(of(0, deniedSingly)); err != nil {
		t.Errorf("a kind that is counted: %v", err)
	}
	if info, err := s.slots.file.Stat(); err != nil || info.Size() > (maxSlots+1)*slotSize {
		t.Errorf("the counters take %d bytes, %v", info.Size(), err)
	}
	d.end("sbx_0")
	if err := d.Begin(of(3, 99)); err != nil {
		t.Errorf("after a tally has ended: %v", err)
	}
}
