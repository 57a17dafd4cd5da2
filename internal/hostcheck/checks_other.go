//go:build !linux

package hostcheck

import (
	"context"
	"runtime"
)

// Checks returns one check, which says that servers run on Linux only.
func Checks(Config) []Check {
	return []Check{func(context.Context) Result {
		return fail("linux", "use a Linux machine for the servers; the client commands work here", "this is %s", runtime.GOOS)
	}}
}

// VMs refuses nothing: servers run on Linux only.
func VMs(context.Context) error { return nil }

// Isolation finds nothing: servers run on Linux only.
func Isolation(context.Context, []string) ([]Result, error) { return nil, nil }
