package main

import (
	"context"
	"fmt"
	"time"
)

// working shows on a terminal that something takes its time; the returned function ends that and clears the line.
func (a *app) working(ctx context.Context, what string) func() {
	return a.workingOn(ctx, func() string { return what })
}

// workingOn likewise, with what there is to say at each moment.
func (a *app) workingOn(ctx context.Context, what func() string) func() {
	if _, ok := terminal(a.stderr); !ok || a.json {
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
					fmt.Fprint(a.stderr, "\r\x1b[K")
				}
				return
			case <-tick.C:
				shown = true
				fmt.Fprintf(a.stderr, "\r\x1b[K%s … %.0f s", visible(what()), time.Since(began).Seconds())
			}
		}
	}()
	return func() {
		cancel()
		<-done
	}
}
