//go:build linux

package userthread

import (
	"context"
	"errors"
	"net/http"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/require"
)

var errGone = errors.New("the caller has gone")

// TestUserThreadsAreBounded: requests beyond the bound wait for others, or until their caller has gone.
func TestUserThreadsAreBounded(t *testing.T) {
	t.Parallel()
	require.Root(t)
	u := New(func() error { return nil })
	cred := &syscall.Credential{Uid: 65534, Gid: 65534}
	release, running, ended := make(chan struct{}), make(chan struct{}), make(chan error)
	for range maxOfUser {
		go func() {
			ended <- u.As(t.Context(), cred, func() error {
				running <- struct{}{}
				<-release
				return nil
			})
		}()
	}
	for range maxOfUser {
		<-running
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errGone)
	if err := u.As(ctx, cred, func() error { t.Error("one too many runs"); return nil }); !errors.Is(err, errGone) {
		t.Errorf("one too many: %v", err)
	}
	u.wait = time.Millisecond
	if err := u.As(t.Context(), cred, func() error { t.Error("one too many runs"); return nil }); core.CodeOf(err) != core.CodeGuestBusy {
		t.Errorf("one too many, and nobody gives up: %v", err)
	}
	if err := u.As(t.Context(), &syscall.Credential{Uid: 1, Gid: 1}, func() error { return nil }); err != nil {
		t.Errorf("another user waits: %v", err)
	}
	close(release)
	for range maxOfUser {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if err := u.As(t.Context(), cred, func() error { return nil }); err != nil {
		t.Error(err)
	}
}

// TestUserThreadEndsMidway: a handler that ends its answer with a panic ends it in its own goroutine.
func TestUserThreadEndsMidway(t *testing.T) {
	t.Parallel()
	require.Root(t)
	u := New(func() error { return nil })
	defer func() {
		if p := recover(); p != http.ErrAbortHandler { //nolint:errorlint // the very value
			t.Errorf("recovered %v", p)
		}
	}()
	_ = u.As(t.Context(), &syscall.Credential{Uid: 65534, Gid: 65534}, func() error { panic(http.ErrAbortHandler) })
}
