package explore

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// sampled is how many schedules run where nobody asks for all of them: evenly out of the list.
const sampled = 5

// alone are what happens meanwhile besides the kinds, and pressed those kinds after which the first controller loses its lease too.
var (
	alone   = []string{nothing, takeover, beats, fencing}
	pressed = []string{"restore", "suspend", "checkpoint", "fork-workspace", "terminate", "delete"}
)

const reportsWrong = 2 // how many of the first reports go wrong

// schedules lists all of them. Their numbers are their places in the list, from 1.
func schedules(t testing.TB) []schedule {
	t.Helper()
	at, every, then := places(t), slices.Clone(alone), []string(nil)
	for _, other := range kinds {
		if other.fault == nil && other.name != fencing { // which is among those alone
			every = append(every, other.name)
		}
	}
	for _, other := range pressed {
		then = append(then, other+", then "+takeover)
	}
	var list []schedule
	add := func(k kind, place string, others ...string) {
		for _, other := range others {
			list = append(list, schedule{k.name, place, other})
		}
	}
	for _, k := range kinds {
		for _, place := range at[k.name] {
			if !strings.HasPrefix(place, "call ") {
				add(k, place, slices.Concat(every, then)...)
				continue
			}
			for _, fault := range mailFaults {
				add(k, place+" "+fault, every...)
			}
		}
		for n := range reportsWrong {
			for _, fault := range mailFaults {
				add(k, fmt.Sprintf("report %d %s", n+1, fault), slices.Concat(alone, pressed)...)
			}
		}
	}
	return list
}

// TestExplore runs a sample of the schedules, or those that the flags say.
func TestExplore(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	all := schedules(t)
	stride, first := max(1, len(all)/sampled), *shard%max(1, len(all)/sampled)
	if *shards > 0 {
		stride, first = *shards, *shard
	}
	if *only != 0 {
		stride, first = len(all), *only-1
	}
	wanted, err := regexp.Compile(*match)
	if err != nil {
		t.Fatal(err)
	}
	if *list {
		for i, s := range all {
			t.Logf("schedule %d: %s", i+1, s)
		}
		return
	}
	ran, missed, left, began := 0, 0, 0, time.Now()
	for i := first; i < len(all); i += stride {
		s, number := all[i], i+1
		if !wanted.MatchString(s.String()) {
			continue
		}
		if *bound > 0 && time.Since(began) > *bound {
			left++
			continue
		}
		t.Run(fmt.Sprint(number), func(t *testing.T) {
			began := time.Now()
			log, reached := run(t, s)
			if len(log.faults) > 0 || *only != 0 {
				t.Log("\n" + strings.Join(log.lines, "\n"))
			}
			for _, fault := range log.faults {
				t.Errorf("FAULT in schedule %d (%s): %s", number, s, fault)
			}
			if len(log.faults) > 0 {
				t.Errorf("again: make explore SCHEDULE=%d", number)
			}
			if ran++; !reached {
				missed++
			}
			t.Logf("schedule %d (%s): reached %v, %s", number, s, reached, time.Since(began).Round(time.Millisecond))
		})
	}
	if left > 0 {
		t.Errorf("%d schedules were not begun within %s", left, *bound)
	}
	t.Logf("%d of %d schedules in %s; %d did not come to their place", ran, len(all), time.Since(began).Round(time.Second), missed)
}
