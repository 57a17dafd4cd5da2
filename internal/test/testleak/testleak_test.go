package testleak

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

const variable = "TESTLEAK_TEST_LEAVE" // how long a goroutine of TestInner lives

func TestMain(m *testing.M) { Main(m) }

// TestInner is run in a process of its own.
func TestInner(t *testing.T) { //nolint:paralleltest // it is alone
	if leave := os.Getenv(variable); leave != "" {
		d, err := time.ParseDuration(leave)
		if err != nil {
			t.Fatal(err)
		}
		if d > patience {
			patience = time.Second
		}
		go func() { <-time.After(d) }()
	}
}

func TestLate(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestInner$")
	cmd.Env = append(os.Environ(), variable+"=2s")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("a goroutine that ends late: %v\n%s", err, out)
	}
}

func TestNever(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestInner$")
	cmd.Env = append(os.Environ(), variable+"=1h")
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "TestInner.func1") {
		t.Errorf("a goroutine that does not end: %v\n%s", err, out)
	}
}
