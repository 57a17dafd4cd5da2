package require

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestListed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		list, name string
		want       bool
	}{
		{"", "vm", false},
		{"vm", "vm", true},
		{"postgres, vm ,netns", "vm", true},
		{"vmm", "vm", false},
		{"all", "vm", true},
		{"postgres,all", "vm", true},
	} {
		if got := listed(c.list, c.name); got != c.want {
			t.Errorf("listed(%q, %q) = %v, want %v", c.list, c.name, got, c.want)
		}
	}
}

// TestInner is what TestOutcome runs in a process of its own.
func TestInner(t *testing.T) {
	switch os.Getenv("REQUIRE_TEST_INNER") {
	case "":
		return
	case "met":
		That(t, "thing", true, "never shown")
		Program(t, "sh", "dash")
	case "unmet":
		That(t, "thing", false, "buy a thing")
	case "program":
		Program(t, "no-such-program-at-all", "no-such-package")
	}
	t.Log("the test went on")
}

func TestOutcome(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, inner, require string
		fails                bool
		want                 []string
	}{
		{"met runs", "met", "all", false, []string{"--- PASS: TestInner", "the test went on"}},
		{"unmet skips with the cure", "unmet", "other", false, []string{"--- SKIP: TestInner", "buy a thing"}},
		{"unmet and listed fails with the cure", "unmet", "other,thing", true, []string{"--- FAIL: TestInner", "buy a thing"}},
		{"all lists everything", "unmet", "all", true, []string{"--- FAIL: TestInner"}},
		{"missing program skips", "program", "", false, []string{"--- SKIP: TestInner", "apt-get install --no-install-recommends no-such-package"}},
		{"missing program listed fails", "program", "no-such-program-at-all", true, []string{"--- FAIL: TestInner"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestInner$", "-test.v")
			cmd.Env = append(os.Environ(), "REQUIRE_TEST_INNER="+c.inner, Variable+"="+c.require)
			out, err := cmd.CombinedOutput()
			if (err != nil) != c.fails {
				t.Errorf("inner test ended with %v, want failure %v", err, c.fails)
			}
			for _, want := range c.want {
				if !strings.Contains(string(out), want) {
					t.Errorf("output lacks %q:\n%s", want, out)
				}
			}
			if c.inner != "met" && strings.Contains(string(out), "went on") {
				t.Errorf("the test went on without its requirement:\n%s", out)
			}
		})
	}
}
