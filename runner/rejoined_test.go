package runner

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/runner/checkpoints"
)

// TestReplaceEndsWithTheRunner: a fork that waits until nothing uses a copy does not keep a runner from ending.
func TestReplaceEndsWithTheRunner(t *testing.T) {
	t.Parallel()
	x := newExpectation(t)
	x.a.checkpoints.Hold(x.c)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	leave, err := x.a.enter()
	if err != nil {
		t.Fatal(err)
	}
	replaced := make(chan error, 1)
	go func() {
		defer leave()
		replaced <- x.a.fetches.ReplaceCaptured(ctx, x.c, x.sources(x.c), &x.truth)
	}()
	x.a.cancel()
	select {
	case err := <-replaced:
		if !errors.Is(err, errStopping) {
			t.Errorf("it ended with %v", err)
		}
	case <-time.After(5 * time.Minute):
		t.Error("it waits although the runner is ending")
	}
	if !x.a.has(x.c) {
		t.Error("the copy is gone although it is in use")
	}
}

// TestReplaceWaits: a copy that must be replaced goes as soon as nothing uses it. One that stays in use is an error that says so.
func TestReplaceWaits(t *testing.T) {
	t.Parallel()
	x := newExpectation(t)
	x.a.checkpoints.Hold(x.c)
	there := func() bool { return x.a.has(x.c) }
	err := x.a.fetches.GiveUpUnused(t.Context(), x.c, 10*time.Millisecond, there)
	if core.CodeOf(err) != core.CodeCheckpointInUse || core.CategoryOf(err) != core.FailedPrecondition || !there() {
		t.Errorf("in use for longer than the limit: %v", err)
	}
	x.a.checkpoints.Release(x.c) // from here on nobody waits
	x.a.checkpoints.Hold(x.c)
	replaced := make(chan error, 1)
	go func() { replaced <- x.a.fetches.ReplaceCaptured(t.Context(), x.c, x.sources(x.c), &x.truth) }()
	eventually.True(t, "it waits", func() (waits bool) {
		x.a.checkpoints.Inspect(func(st checkpoints.State) { waits = st.Awaited })
		return waits
	})
	x.a.checkpoints.Release(x.c)
	if err := <-replaced; err != nil || there() {
		t.Errorf("not in use any more: %v; it is there: %v", err, there())
	}
}
