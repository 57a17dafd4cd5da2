package netns

import (
	"fmt"

	"github.com/vishvananda/netns"

	"github.com/coppice-dev/coppice/internal/osthread"
)

// inside runs fn on an OS thread whose network namespace is ns and which ends with fn. fn may open sockets and start
// processes, which stay in the namespace; goroutines that it starts are not in it.
func inside(ns netns.NsHandle, fn func() error) error {
	return osthread.Do(func() error {
		if err := netns.Set(ns); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return fn()
	})
}
