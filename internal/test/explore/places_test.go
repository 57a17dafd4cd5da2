package explore

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/internal/failpoint"
)

var update = flag.Bool("update", false, "write testdata/places.txt again")

const placesFile = "testdata/places.txt"

// places reads at which places each kind can be stopped: a line has a kind, the steps of its controller and the failpoints that it
// passes. The numbers of schedules depend on it, so it is a file.
func places(t testing.TB) map[string][]string {
	t.Helper()
	b, err := os.ReadFile(placesFile)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]string{}
	for line := range strings.Lines(string(b)) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), ": ")
		out[name] = strings.Split(rest, ", ")
	}
	return out
}

// TestPlaces runs kinds, some or, with all schedules, each once, and compares where they came by with the file.
func TestPlaces(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	var lines []string
	for _, k := range kinds {
		if !*update && *shards == 0 && !slices.Contains(usual, k.name) {
			continue
		}
		got := passed(t, k)
		lines = append(lines, k.name+": "+strings.Join(got, ", ")+"\n")
		if *update {
			continue
		}
		if diff := cmp.Diff(places(t)[k.name], got); diff != "" {
			t.Errorf("%s passes other places (-file +now); look at them and run go test ./internal/test/explore -run TestPlaces -update:\n%s", k.name, diff)
		}
	}
	if *update {
		if err := os.WriteFile(placesFile, []byte(strings.Join(lines, "")), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// usual are the kinds that are looked at where nobody asks for all schedules.
var usual = []string{"fork", "terminate", fencing}

// beside are points of what a runner does beside: whether an operation sees them is chance.
var beside = []string{"rebase.after_base", "rebase.written", "roots.judged", "roots.placed", "controller.after_condemn", "controller.after_delete"}

// sometimes are further ones, of a kind.
var sometimes = map[string][]string{"grant": {"call 2"}, "revoke": {"call 2"}}

// passed runs a kind and returns where it came by.
func passed(t *testing.T, k kind) []string {
	t.Helper()
	w, err := newWorld(t, schedule{kind: k.name}.has("grant", "revoke"))
	defer w.end()
	var set scene
	if err == nil {
		set, err = w.set(k)
	}
	if err != nil {
		t.Fatal(err, strings.Join(w.log.lines, "\n"))
	}
	armed := map[string]*failpoint.Armed{}
	for _, name := range failpoint.Names() {
		if armed[name], err = failpoint.Arm(name, failpoint.Action{Kind: failpoint.Hang, From: 1 << 30}); err != nil {
			t.Fatal(err)
		}
		defer armed[name].Disarm()
	}
	w.sides[0].arm(0)
	w.calls.arm(0, "")
	if r := <-w.ask(w.first, k, set); (r.err != nil) != (k.fault != nil) || !r.done {
		t.Errorf("%s: %+v", k.name, r)
	}
	calls := w.calls.messages()
	w.settle()
	w.check(schedule{kind: k.name}, set, nil)
	for _, fault := range w.log.faults {
		t.Errorf("%s: %s", k.name, fault)
	}
	var list []string
	for i := range w.sides[0].steps() {
		list = append(list, fmt.Sprintf("step %d", i+1))
	}
	for i := range calls {
		list = append(list, fmt.Sprintf("call %d", i+1))
	}
	for _, name := range failpoint.Names() {
		if armed[name].Hits() > 0 && !slices.Contains(beside, name) {
			list = append(list, name)
		}
	}
	return slices.DeleteFunc(list, func(place string) bool { return slices.Contains(sometimes[k.name], place) })
}
