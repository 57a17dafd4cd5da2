package e2e

import (
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestClockRate compares how fast the clocks of a guest and of the host run. However busy the host is, the guest's second reading lies
// between the ends of the two calls as the host sees them.
func TestClockRate(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	type reading struct{ guest, before, after time.Duration }
	began := time.Now()
	read := func() reading {
		r := reading{before: time.Since(began)}
		text, _, _ := strings.Cut(shell(t, s, ws, "cat /proc/uptime"), " ")
		r.after = time.Since(began)
		seconds, err := strconv.ParseFloat(text, 64)
		if err != nil {
			t.Fatal(err)
		}
		r.guest = time.Duration(seconds * float64(time.Second))
		return r
	}
	first := read()
	last := read()
	for last.before-first.after < 2*time.Second { // for the rate to show
		last = read()
	}
	passed, least, most := last.guest-first.guest, last.before-first.after, last.after-first.before
	const blur = 20 * time.Millisecond // of two readings of /proc/uptime
	if passed < least-least/50-blur || passed > most+most/50+blur {
		t.Errorf("in the guest %s passed, and on the host between %s and %s", passed, least, most)
	}
	if text := shell(t, s, ws, "cat /proc/cmdline"); !strings.Contains(text, " tsc_early_khz=") && strings.Contains(text, "mitigations=off") {
		t.Errorf("a guest under TCG had to measure its clock by itself: %q", text)
	}
}
