package explore

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
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
	var turn []int // the numbers to run
	for i := first; i < len(all); i += stride {
		if wanted.MatchString(all[i].String()) {
			turn = append(turn, i+1)
		}
	}
	if *only != "" {
		turn = numbers(t, *only, len(all))
	} else {
		slices.SortStableFunc(turn, func(a, b int) int { return all[a-1].group() - all[b-1].group() })
	}
	x := &exploration{all: all, turn: turn, began: time.Now()}
	for len(x.turn) > 0 && !x.late() {
		t.Run(fmt.Sprint("world of ", x.turn[0]), x.world)
	}
	if left := len(x.turn); left > 0 {
		t.Errorf("%d schedules were not begun within %s", left, *bound)
	}
	t.Logf("%d of %d schedules in %d worlds in %s; %d did not come to their place", x.ran, len(all), x.worlds, time.Since(x.began).Round(time.Second), x.missed)
}

// numbers reads the numbers of schedules.
func numbers(t *testing.T, list string, most int) (out []int) {
	t.Helper()
	for text := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > most {
			t.Fatalf("%q is not the number of a schedule: those are 1 to %d", text, most)
		}
		out = append(out, n)
	}
	return out
}

// exploration is what TestExplore does.
type exploration struct {
	all                 []schedule
	turn                []int // the numbers of those that were not begun
	began               time.Time
	ran, missed, worlds int
}

// perWorld is how many schedules are played in a world. A world costs more than a schedule.
const perWorld = 24

// world makes a world and plays the next schedules in it, until one breaks something.
func (x *exploration) world(t *testing.T) {
	x.worlds++
	number := x.turn[0]
	x.turn = x.turn[1:] // it is not tried again if there can be no world
	s := x.all[number-1]
	w, err := newWorld(t, s.granting())
	defer w.end()
	if err != nil {
		t.Fatalf("FAULT in schedule %d: its world was not made: %v\n%s", number, err, strings.Join(w.log.lines, "\n"))
	}
	for {
		w.played = append(w.played, fmt.Sprint(number))
		last := !t.Run(fmt.Sprint(number), func(t *testing.T) { x.play(t, w, number, s) }) || s.needsOwnWorld() || len(w.played) == perWorld
		if last || len(x.turn) == 0 || x.late() || x.all[x.turn[0]-1].group() != s.group() {
			break
		}
		number = x.turn[0]
		x.turn = x.turn[1:]
		s = x.all[number-1]
	}
	w.end()
	if lines, faults := w.log.take(); len(faults) > 0 {
		t.Errorf("FAULT in schedule %s, at the end of its world: %s\n%s", strings.Join(w.played, ","), strings.Join(faults, "; "), strings.Join(lines, "\n"))
	}
}

// late reports whether no more schedules may begin.
func (x *exploration) late() bool { return *bound != 0 && time.Since(x.began) > *bound }

// play plays a schedule, and says what it broke.
func (x *exploration) play(t *testing.T, w *world, number int, s schedule) {
	t.Helper()
	began := time.Now()
	reached := w.play(s)
	if !w.log.broken() && !s.needsOwnWorld() {
		w.clear(s)
	}
	lines, faults := w.log.take()
	if len(faults) > 0 || *only != "" {
		t.Log("\n" + strings.Join(lines, "\n"))
	}
	for _, fault := range faults {
		t.Errorf("FAULT in schedule %d (%s): %s", number, s, fault)
	}
	if len(faults) > 0 {
		t.Errorf("again: make explore SCHEDULE=%d, or with what its world had played before: SCHEDULE=%s", number, strings.Join(w.played, ","))
	}
	if x.ran++; !reached {
		x.missed++
	}
	t.Logf("schedule %d (%s): reached %v, %s", number, s, reached, time.Since(began).Round(time.Millisecond))
}
