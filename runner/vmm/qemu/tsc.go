package qemu

import (
	"fmt"
	"runtime"
	"sync"
	"time"
)

// Under TCG a guest's time stamp counter is the host's. A guest kernel measures the counter's frequency against the emulated PIT when
// it boots. On a busy host this can go wrong: at a load of 26 on two processors, one boot in four measured 504 MHz instead of 2,596
// MHz. The clock of that guest, and of every fork of its checkpoints, ran five times too fast. So the host measures the frequency and
// tells it to the kernel.

const (
	tscInterval = 50 * time.Millisecond // between the two readings
	tscTries    = 1000                  // attempts for each reading; the one with the smallest blur counts
	tscBlur     = 50 * time.Microsecond // the largest blur that is accepted: 0.1 % of the interval, for each of the two readings
)

// hostTSC is the frequency of the host's time stamp counter in kHz. It is 0 if the host has no counter, or if the measurement failed.
var hostTSC = sync.OnceValue(func() uint64 { return measureTSC(readTSC, time.Now) })

// tscReading is the counter's value at a time.
type tscReading struct {
	ticks uint64
	at    time.Time
	blur  time.Duration // the counter was read at most this long after at
}

func measureTSC(ticks func() uint64, now func() time.Time) uint64 {
	if ticks() == 0 {
		return 0
	}
	first := takeTSC(ticks, now)
	<-time.After(tscInterval)
	last := takeTSC(ticks, now)
	elapsed := last.at.Sub(first.at)
	if first.blur > tscBlur || last.blur > tscBlur || elapsed <= 0 || last.ticks <= first.ticks {
		return 0
	}
	return uint64(float64(last.ticks-first.ticks) / elapsed.Seconds() / 1000)
}

// takeTSC reads the counter between two readings of the clock. It tries many times and returns the attempt with the shortest time between
// these two readings, because that attempt was not interrupted.
func takeTSC(ticks func() uint64, now func() time.Time) tscReading {
	best := tscReading{blur: time.Hour}
	for range tscTries {
		before := now()
		n := ticks()
		if blur := now().Sub(before); blur < best.blur {
			best = tscReading{n, before, blur}
		}
	}
	return best
}

// tscArgument is the option that tells the kernel of a guest under TCG the counter's frequency.
func tscArgument(khz uint64) string {
	if khz == 0 || runtime.GOARCH != "amd64" {
		return ""
	}
	return fmt.Sprintf(" tsc_early_khz=%d", khz)
}
