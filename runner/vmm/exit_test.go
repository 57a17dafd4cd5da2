package vmm

import (
	"strings"
	"testing"
)

func TestDescribe(t *testing.T) {
	t.Parallel()
	many := strings.Repeat("a line\n", 20)
	for name, c := range map[string]struct {
		exit        Exit
		first       string
		want        []string
		lines, most int
	}{
		"nothing was said": {Exit{Status: "signal: killed"}, "its VMM ended: signal: killed", nil, 1, 1},
		"the last lines":   {Exit{Status: "exit status 1", Log: many + "no such device", Console: many + "the end\n"}, "its VMM ended: exit status 1", []string{"no such device", "the end"}, 32, 32},
		"a panic": {
			Exit{Status: "exit status 0", Console: many + "[  639.7] Kernel panic - not syncing: sysrq triggered crash\n[  639.8] CPU: 0\n" + many + "[ 640.0] Kernel panic - not syncing: another\n"},
			"its VMM ended: exit status 0, after a panic of the guest's kernel: sysrq triggered crash",
			[]string{"\na line\n[  639.7] Kernel panic", "CPU: 0", "another"},
			40, 40,
		},
		"a flood": {Exit{Status: "exit status 1", Console: strings.Repeat("x", 8*maxExitConsole) + "the end"}, "its VMM ended: exit status 1", []string{"xthe end"}, 2, 2},
		"a panic after a flood": {
			Exit{Status: "exit status 0", Console: strings.Repeat("x", 8*maxExitConsole) + "\n[ 639.7] Kernel panic - not syncing: oops\n" + strings.Repeat(strings.Repeat("y", 90)+"\n", 100)},
			"its VMM ended: exit status 0, after a panic of the guest's kernel: oops",
			[]string{"console: [ 639.7] Kernel panic"},
			40, exitLines,
		},
	} {
		got := c.exit.Describe()
		first, _, _ := strings.Cut(got, "\n")
		if n := strings.Count(got, "\n") + 1; first != c.first || n < c.lines || n > c.most {
			t.Errorf("%s: %d lines, %q", name, n, got)
		}
		if len(got) > len(c.first)+maxExitConsole+1000 {
			t.Errorf("%s: %d bytes", name, len(got))
		}
		for _, want := range c.want {
			if !strings.Contains(got, want) {
				t.Errorf("%s: %q lacks %q", name, got, want)
			}
		}
	}
}
