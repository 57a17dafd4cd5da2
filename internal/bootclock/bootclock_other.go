//go:build !linux

package bootclock

import "time"

var began = time.Now()

// Now is the time since the start of the process by the wall clock, which goes on while the host sleeps. Servers run on Linux
// only; this is for programs that link them.
func Now() time.Duration { return time.Now().Round(0).Sub(began.Round(0)) }
