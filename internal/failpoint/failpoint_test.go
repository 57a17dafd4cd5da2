package failpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var (
	stepOne = New("test.step_one")
	stepTwo = New("test.step_two")
)

const innerEnv = "FAILPOINT_TEST_LIST" // makes the test binary arm these and go through both steps

func TestMain(m *testing.M) {
	if list := os.Getenv(innerEnv); list != "" {
		if err := ArmList(list); err != nil {
			panic(err)
		}
		defer fmt.Println("deferred")
		for range 2 {
			fmt.Println("one", stepOne.Hit(context.Background()), "two", stepTwo.Hit(context.Background()))
		}
		return
	}
	os.Exit(m.Run())
}

func arm(t *testing.T, name string, a Action) *Armed {
	t.Helper()
	armed, err := Arm(name, a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(armed.Disarm)
	return armed
}

// The tests that arm points of this package are not parallel: points are global.

func TestFail(t *testing.T) {
	if err := stepOne.Hit(t.Context()); err != nil {
		t.Fatalf("not armed, and yet %v", err)
	}
	armed := arm(t, "test.step_one", Action{Kind: Fail})
	if err := stepOne.Hit(t.Context()); !errors.Is(err, ErrInjected) || !strings.Contains(err.Error(), "test.step_one") {
		t.Errorf("got %v, want %v with the name", err, ErrInjected)
	}
	if err := stepTwo.Hit(t.Context()); err != nil {
		t.Errorf("another point fired: %v", err)
	}
	armed.Disarm()
	if err := stepOne.Hit(t.Context()); err != nil {
		t.Errorf("disarmed, and yet %v", err)
	}
	cause := errors.New("cause")
	armed = arm(t, "test.step_one", Action{Kind: Fail, Err: cause, From: 3})
	var got []bool
	for range 4 {
		got = append(got, errors.Is(stepOne.Hit(t.Context()), cause))
	}
	if diff := cmp.Diff([]bool{false, false, true, true}, got); diff != "" {
		t.Error(diff)
	}
	if n := armed.Hits(); n != 4 {
		t.Errorf("%d hits, want all 4", n)
	}
}

func TestPanic(t *testing.T) {
	arm(t, "test.step_one", Action{Kind: Panic})
	defer func() {
		if err, ok := recover().(error); !ok || !errors.Is(err, ErrInjected) {
			t.Errorf("recovered %v, want %v", err, ErrInjected)
		}
	}()
	_ = stepOne.Hit(t.Context())
}

func TestHang(t *testing.T) {
	armed := arm(t, "test.step_one", Action{Kind: Hang})
	var wg sync.WaitGroup
	errs := make(chan error, 2)
	cancelled, cancel := context.WithCancelCause(t.Context())
	for _, ctx := range []context.Context{t.Context(), cancelled} {
		wg.Go(func() { errs <- stepOne.Hit(ctx) })
	}
	<-armed.Reached()
	cause := errors.New("cause")
	cancel(cause)
	if err := <-errs; !errors.Is(err, cause) {
		t.Errorf("a cancelled hang gave %v, want the cause", err)
	}
	armed.Release()
	if err := <-errs; err != nil {
		t.Errorf("a released hang gave %v", err)
	}
	wg.Wait()
	if err := stepOne.Hit(t.Context()); err != nil {
		t.Errorf("a hit after the release gave %v", err)
	}
}

func TestArmingAgainReleases(t *testing.T) {
	armed := arm(t, "test.step_one", Action{Kind: Hang})
	done := make(chan error)
	go func() { done <- stepOne.Hit(t.Context()) }()
	<-armed.Reached()
	again := arm(t, "test.step_one", Action{Kind: Fail})
	if err := <-done; err != nil {
		t.Errorf("got %v", err)
	}
	armed.Disarm() // does not disarm the newer one
	if err := stepOne.Hit(t.Context()); !errors.Is(err, ErrInjected) {
		t.Errorf("got %v, want %v", err, ErrInjected)
	}
	again.Disarm()
}

func TestProcessEnds(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		list   string
		signal syscall.Signal
		status int
		out    string
	}{
		{"test.step_two=kill", syscall.SIGKILL, -1, ""},
		{"test.step_one=error, test.step_two=exit@2", 0, ExitStatus, "one failpoint: injected failure at test.step_one two <nil>\n"},
	} {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), innerEnv+"="+c.list)
		out, err := cmd.Output()
		var exit *exec.ExitError
		if !errors.As(err, &exit) {
			t.Fatalf("%s: ended with %v", c.list, err)
		}
		ws, ok := exit.Sys().(syscall.WaitStatus)
		if !ok || (ws.Signaled() && ws.Signal() != c.signal) || ws.ExitStatus() != c.status {
			t.Errorf("%s: ended with %v", c.list, err)
		}
		if diff := cmp.Diff(c.out, string(out)); diff != "" {
			t.Errorf("%s: %s", c.list, diff)
		}
	}
}

// TestProcessStops: it stops once, and goes on as if nothing had been.
func TestProcessStops(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), innerEnv+"=test.step_one=stop")
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var ws syscall.WaitStatus
	if _, err := syscall.Wait4(cmd.Process.Pid, &ws, syscall.WUNTRACED, nil); err != nil || !ws.Stopped() || ws.StopSignal() != syscall.SIGSTOP {
		t.Fatalf("the process has not stopped: %v, %v", ws, err)
	}
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("after it went on: %v", err)
	}
	const line = "one <nil> two <nil>\n"
	if diff := cmp.Diff(line+line+"deferred\n", out.String()); diff != "" {
		t.Error(diff)
	}
}

func TestBadLists(t *testing.T) {
	for list, want := range map[string]string{
		"test.step_one":                            "write name=action",
		"test.step_one=burn":                       "no action",
		"test.step_one=error@0":                    "not a count",
		"test.absent=error":                        "test.step_one, test.step_two",
		"test.step_one=error,test.step_two=nobody": "no action",
	} {
		if err := ArmList(list); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", list, err, want)
		}
		if err := stepOne.Hit(t.Context()); err != nil {
			t.Errorf("%s: a bad list armed something", list)
		}
	}
	if err := ArmList(""); err != nil {
		t.Error(err)
	}
}

func TestNames(t *testing.T) {
	t.Parallel()
	if diff := cmp.Diff([]string{"test.step_one", "test.step_two"}, Names()); diff != "" {
		t.Error(diff)
	}
	defer func() {
		if recover() == nil {
			t.Error("a taken name was accepted")
		}
	}()
	New("test.step_one")
}

func BenchmarkNotArmed(b *testing.B) {
	for b.Loop() {
		_ = stepOne.Hit(b.Context())
	}
}
