package render

import (
	"strings"
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestTableWithNotes: each note is below its row, also if a cell holds line breaks and tabs.
func TestTableWithNotes(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	rows := [][]string{{"a\nb\r\n", "1\t2\v\f"}, {"\u2028\u0085", ""}, {"c", "3"}}
	if err := TableWithNotes(&b, "NAME N", rows, []string{"first\nnote", "", "third"}); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	if len(lines) != 6 || !strings.HasPrefix(lines[1], `a\nb`) || lines[2] != `  first\nnote` || lines[5] != "  third" {
		t.Errorf("%q", lines)
	}
}

func TestSlowest(t *testing.T) {
	t.Parallel()
	list := coppice.Timings{{Stage: "shell", DurationMS: 1}, {Stage: "restore", DurationMS: 20}, {Stage: "clone", DurationMS: 2}, {Stage: "reseal", DurationMS: 140}}
	for n, want := range map[int]string{2: "restore 20.0 ms, reseal 140 ms, …", 4: "shell 1.0 ms, restore 20.0 ms, clone 2.0 ms, reseal 140 ms"} {
		if got := Slowest(list, n); got != want {
			t.Errorf("the slowest %d: %q, want %q", n, got, want)
		}
	}
}
