package sidecar_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coppice-dev/coppice/internal/sidecar"
)

// TestAttend: a process that ends has ended, one that does not answer several times in a row hung, and the end of the caller's context is neither.
func TestAttend(t *testing.T) {
	t.Parallel()
	gone, enough := errors.New("gone"), errors.New("enough")
	for name, test := range map[string]struct {
		ends    time.Duration // when the process ends; 0: never
		answers int           // how many answers come before there are no more
		stop    time.Duration // when the caller's context ends; 0: never
		want    error
		at      time.Duration
	}{
		"it ends":            {ends: 90 * time.Second, answers: 1000, want: gone, at: 90 * time.Second},
		"it hangs":           {answers: 2, want: sidecar.ErrHung, at: 15 * time.Second}, // it is asked at 3, 6, 9 and 12 s, for 3 s each
		"the caller stops":   {answers: 1000, stop: 7 * time.Second, want: enough, at: 7 * time.Second},
		"it ends in silence": {ends: 10 * time.Second, want: gone, at: 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			socket := filepath.Join(t.TempDir(), "sock") // nobody listens there
			synctest.Test(t, func(t *testing.T) {
				ctx, stop := context.WithCancelCause(t.Context())
				defer stop(nil)
				if test.stop > 0 {
					time.AfterFunc(test.stop, func() { stop(enough) })
				}
				began, answers := time.Now(), test.answers
				err := sidecar.Pulse{Every: time.Second, Limit: 3 * time.Second, Misses: 4}.Attend(ctx, sidecar.Watched{
					Name: "helper", Socket: socket,
					Watch: func(ctx context.Context) error {
						var end <-chan time.Time
						if test.ends > 0 {
							end = time.After(test.ends)
						}
						select {
						case <-end:
							return gone
						case <-ctx.Done():
							return context.Cause(ctx)
						}
					},
					Ask: func(ctx context.Context, limit time.Duration) error {
						if answers--; answers >= 0 {
							return nil
						}
						select {
						case <-time.After(limit):
							return sidecar.ErrSilent
						case <-ctx.Done():
							return context.Cause(ctx)
						}
					},
				})
				if !errors.Is(err, test.want) || time.Since(began) != test.at {
					t.Errorf("after %s: %v, want %v after %s", time.Since(began), err, test.want, test.at)
				}
			})
		})
	}
}
