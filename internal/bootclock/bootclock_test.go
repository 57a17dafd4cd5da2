package bootclock_test

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/bootclock"
)

// TestNow compares with the kernel's own account of the time since boot, which has the time that the host slept.
func TestNow(t *testing.T) {
	t.Parallel()
	uptime := func() time.Duration {
		b, err := os.ReadFile("/proc/uptime")
		if err != nil {
			t.Fatal(err)
		}
		text, _, _ := strings.Cut(string(b), " ")
		seconds, err := strconv.ParseFloat(text, 64)
		if err != nil {
			t.Fatal(err)
		}
		return time.Duration(seconds * float64(time.Second))
	}
	before, now, after := uptime(), bootclock.Now(), uptime()
	const grain = 20 * time.Millisecond // of /proc/uptime
	if now < before-grain || now > after+grain {
		t.Errorf("it is %s between %s and %s", now, before, after)
	}
	if then := bootclock.Now(); then < now {
		t.Errorf("it went from %s back to %s", now, then)
	}
}
