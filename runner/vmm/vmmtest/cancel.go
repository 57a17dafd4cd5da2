package vmmtest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"testing"
	"time"
)

func contains(b []byte, s string) bool { return bytes.Contains(b, []byte(s)) }

var errGivenUp = errors.New("the caller gave up")

// givenUp returns a context that ends after a while; at once for 0.
func givenUp(t *testing.T, after time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithCancelCause(t.Context())
	if after == 0 {
		cancel(errGivenUp)
		return ctx
	}
	timer := time.AfterFunc(after, func() { cancel(errGivenUp) })
	t.Cleanup(func() { timer.Stop(); cancel(nil) })
	return ctx
}

func testSpawnCancelled(t *testing.T, w *world) {
	t.Helper()
	for _, after := range []time.Duration{0, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond} {
		spec := w.newSpec(t, w.template.base, w.template.disk, true)
		m, err := w.Driver.Spawn(givenUp(t, after), spec)
		if err == nil { // it was faster
			killSpawned(t, m)
			if after == 0 {
				t.Error("a machine was spawned for a caller that had given up")
			}
			continue
		}
		if !errors.Is(err, errGivenUp) && !errors.Is(err, context.Canceled) {
			t.Errorf("given up after %s: got %v, want the cause", after, err)
		}
		nothingLeft(t, "given up after "+after.String(), spec.ID, spec.Dir)
	}
}

func testOutlivesContext(t *testing.T, w *world) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	v, err := w.Driver.Spawn(ctx, w.newSpec(t, w.template.base, w.template.disk, true))
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{Machine: v, w: w, base: w.template.base}
	t.Cleanup(func() { m.kill(t) })
	if err := m.Restore(ctx, w.template.restoreSpec(t)); err != nil {
		t.Fatal(err)
	}
	if err := m.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	cancel()
	m.want(t, "1", "count")
}

// testCommandCancelled cancels each command; the machine must be usable afterwards.
func testCommandCancelled(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	for _, after := range []time.Duration{0, 50 * time.Microsecond, 200 * time.Microsecond, time.Millisecond} {
		what := "given up after " + after.String()
		check := func(verb string, err error) {
			t.Helper()
			if err != nil && !errors.Is(err, errGivenUp) && !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %s: got %v, want the cause", what, verb, err)
			}
		}
		check("pause", m.Pause(givenUp(t, after)))
		m.pause(t)
		m.runs(t, false)
		check("save", m.SaveState(givenUp(t, after), open(t, m.w.path(), os.O_WRONLY|os.O_CREATE)))
		m.runs(t, false)
		m.save(t, m.w.path())
		check("resume", m.Resume(givenUp(t, after)))
		m.resume(t)
		m.runs(t, true)
		_, err := m.Running(givenUp(t, after))
		check("running", err)
	}
	m.want(t, "2", "inc")
	s := m.capture(t)
	w.fork(t, s).want(t, "2", "count")

	shell := w.shell(t, w.template)
	if err := shell.Restore(givenUp(t, 0), w.template.restoreSpec(t)); !errors.Is(err, errGivenUp) && !errors.Is(err, context.Canceled) {
		t.Errorf("restore: got %v, want the cause", err)
	}
	shell.kill(t)
}
