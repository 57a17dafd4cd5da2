package render

import (
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestSlowest(t *testing.T) {
	t.Parallel()
	list := coppice.Timings{{Stage: "shell", DurationMS: 1}, {Stage: "restore", DurationMS: 20}, {Stage: "clone", DurationMS: 2}, {Stage: "reseal", DurationMS: 140}}
	for n, want := range map[int]string{2: "restore 20.0 ms, reseal 140 ms, …", 4: "shell 1.0 ms, restore 20.0 ms, clone 2.0 ms, reseal 140 ms"} {
		if got := Slowest(list, n); got != want {
			t.Errorf("the slowest %d: %q, want %q", n, got, want)
		}
	}
}
