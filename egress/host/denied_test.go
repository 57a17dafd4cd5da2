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

// sum adds up how many flows were told, by host.
func sum(list []core.Flow) (all int64, by map[string]int64) {
	by = map[string]int64{}
	for _, f := range list {
		all += f.Flows()
		by[f.Host] += f.Flows()
	}
	return all, by
}

// TestDeniedFlowsAreCounted: a sandbox that is denied many flows to few hosts and to many gets few records, in which none of them is missing,
// also when the process ends without a word in the middle of it.
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
	// The process is killed: what is on the disk goes on elsewhere.
	copied := t.TempDir()
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	for what, list := range map[string][]core.Flow{
		"killed": told(t, spoolIn(t, copied, 64<<20)),
		"ended":  func() []core.Flow { d.end(""); return told(t, s) }(),
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

// TestTalliesEnd: a tally ends with its time, and the next flows begin another. What is told twice has counts of its own.
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
	if all, _ := sum(told(t, s)); all != deniedSingly {
		t.Errorf("%d flows are told before their time", all)
	}
	d.tidy(time.Now().Add(2 * time.Hour))
	for i := range 3 {
		if err := d.Begin(denial(1000+i, "a.example", "no")); err != nil {
			t.Fatal(err)
		}
	}
	if all, _ := sum(told(t, s)); all != 100-deniedSingly+3 || len(d.of) != 1 {
		t.Errorf("%d flows are told of %d", all, 100-deniedSingly+3)
	}
}

// TestTalliesOverSegments: tallies that go on while segments come and go are as exact as any.
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
	told(t, s)
	for i := range 50 {
		if err := d.Begin(denial(1000+i, "a.example", "no")); err != nil {
			t.Fatal(err)
		}
	}
	copied := t.TempDir()
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	_, by := sum(told(t, spoolIn(t, copied, 64<<20)))
	if by["a.example"] != 150-deniedSingly {
		t.Errorf("%d flows are told, want %d", by["a.example"], 150-deniedSingly)
	}
}
