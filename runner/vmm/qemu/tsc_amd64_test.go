package qemu

import (
	"testing"
	"time"
)

// TestHostTSC measures the host's counter twice.
func TestHostTSC(t *testing.T) {
	t.Parallel()
	one, two := hostTSC(), measureTSC(readTSC, time.Now)
	if one == 0 || two == 0 || one > two+two/200 || two > one+one/200 {
		t.Errorf("measured %d and %d kHz", one, two)
	}
	t.Logf("%d kHz", one)
}
