// Package bootclock is the clock of leases. It does not jump when the host's time is set, and it
// goes on while the host sleeps. The monotonic clock of package time stops during sleep: afterwards
// it says that a lease of this host is still valid, although the others have seen it expire.
package bootclock

import (
	"os"
	"strings"
	"sync"
	"time"
)

// Clock says how long ago the clock began. Only differences mean something.
type Clock func() time.Duration

// BootID is the id of the host's boot, with which the clock began. It is empty if the host has none.
var BootID = sync.OnceValue(func() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // if it is absent, the boot id stays empty
	return strings.TrimSpace(string(b))
})
