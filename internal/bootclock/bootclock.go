// Package bootclock is the clock of leases. No step of the host's time changes it, and it goes on while the host sleeps. The
// monotonic clock of the package time stops then: after a sleep it says that a lease of this host is still good, although
// the others have seen it run out.
package bootclock

import "time"

// Clock says how long ago the clock began. Only differences mean something.
type Clock func() time.Duration
