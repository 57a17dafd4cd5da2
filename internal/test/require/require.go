// Package require says what a test needs of the machine. A test that lacks a requirement is skipped with the cure
// in the message, so that `go test ./...` works for everyone; a requirement listed in COPPICE_TEST_REQUIRE fails
// the test instead, so that on CI "green" cannot mean "skipped".
//
// COPPICE_TEST_REQUIRE is a comma-separated list of requirement names, or "all". The names in use are listed in
// docs/DEVELOPING.md; the name of a program (see Program) is its requirement's name.
package require

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Variable is the environment variable that turns skips into failures.
const Variable = "COPPICE_TEST_REQUIRE"

// All in the variable means every requirement.
const All = "all"

// That needs the named requirement, which the caller found to be met or not. The cure is a short imperative that a
// reader can follow: a command to run or a setting to change.
func That(tb testing.TB, name string, ok bool, cure string) {
	tb.Helper()
	if ok {
		return
	}
	if Listed(name) {
		tb.Fatalf("this test needs %q, which %s demands and this machine lacks; cure: %s", name, Variable, cure)
	}
	tb.Skipf("this test needs %q; cure: %s (or list %q in %s to fail here)", name, cure, name, Variable)
}

// Root needs the test to run as root. The requirement's name is "root".
func Root(tb testing.TB) {
	tb.Helper()
	That(tb, "root", os.Geteuid() == 0, "run the tests as root, for example: sudo -E make test")
}

// Program needs an executable, which the named Debian package holds, and returns its path. The requirement's name
// is the program's.
func Program(tb testing.TB, name, pkg string) string {
	tb.Helper()
	path, err := exec.LookPath(name)
	That(tb, name, err == nil, "apt-get install --no-install-recommends "+pkg)
	return path
}

// Listed reports whether the named requirement must not be skipped.
func Listed(name string) bool {
	return listed(os.Getenv(Variable), name)
}

func listed(list, name string) bool {
	for item := range strings.SplitSeq(list, ",") {
		if item = strings.TrimSpace(item); item == All || item == name {
			return true
		}
	}
	return false
}
