package bootclock

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now is the time since the boot of the host, with the time that it slept.
func Now() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) // cannot fail
	return time.Duration(ts.Nano())
}
