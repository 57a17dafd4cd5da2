package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/internal/cli/terminal"
	"github.com/coppice-dev/coppice/internal/foreign"
)

// Working shows on a terminal that something takes time. The returned function ends this and clears the line.
func (a *App) Working(ctx context.Context, what string) func() {
	return a.WorkingOn(ctx, func() string { return what })
}

// WorkingOn is Working with a text that changes with the progress.
func (a *App) WorkingOn(ctx context.Context, what func() string) func() {
	if _, ok := terminal.Descriptor(a.Stderr); !ok || a.JSON {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		began, tick := time.Now(), time.NewTicker(200*time.Millisecond)
		defer tick.Stop()
		shown := false
		for {
			select {
			case <-ctx.Done():
				if shown {
					fmt.Fprint(a.Stderr, "\r\x1b[K")
				}
				return
			case <-tick.C:
				shown = true
				fmt.Fprintf(a.Stderr, "\r\x1b[K%s … %.0f s", foreign.Visible(what()), time.Since(began).Seconds())
			}
		}
	}()
	return func() {
		cancel()
		<-done
	}
}
