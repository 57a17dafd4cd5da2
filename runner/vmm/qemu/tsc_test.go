package qemu

import (
	"testing"
	"time"
)

// TestMeasureTSC measures a counter of 2 GHz. Now and then the measurement is interrupted for a second.
func TestMeasureTSC(t *testing.T) {
	t.Parallel()
	start := time.Now()
	calls := 0
	now := func() time.Time { return time.Now().Add(time.Duration(calls/10) * time.Second) } // a second passes at each tenth call
	ticks := func() uint64 {
		calls++
		return uint64(now().Sub(start).Nanoseconds()+1) * 2
	}
	if khz := measureTSC(ticks, now); khz < 1_990_000 || khz > 2_010_000 {
		t.Errorf("measured %d kHz for 2,000,000", khz)
	}
	if khz := measureTSC(func() uint64 { return 0 }, time.Now); khz != 0 {
		t.Errorf("a host without the counter has %d kHz", khz)
	}
	blurred := func() time.Time { // no two readings of this clock are near each other
		start = start.Add(time.Millisecond)
		return start
	}
	if khz := measureTSC(ticks, blurred); khz != 0 {
		t.Errorf("of a clock that cannot be read in time it made %d kHz", khz)
	}
}
