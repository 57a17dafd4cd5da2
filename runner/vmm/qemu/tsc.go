package qemu

import (
	"fmt"
	"runtime"
	"sync"
	"time"
)

// Under TCG a guest's time stamp counter is the host's. A guest kernel measures the counter's frequency against the emulated PIT when
// it boots. On a busy host that goes wrong: at a load of 26 on two processors one boot in four took 504 MHz for 2,596 MHz, and
// the clock of that guest, and of every fork of its checkpoints, ran five times too fast. So the host measures, and tells the kernel.

const (
	tscInterval = 50 * time.Millisecond // between the two readings
	tscTries    = 1000                  // of a reading, of which the narrowest counts
	tscBlur     = 50 * time.Microsecond // the widest reading that is used: 0.1 % of the interval, for each of the two
)

// hostTSC is the frequency of the host's time stamp counter in kHz, or 0 if it has none or it could not be measured.
var hostTSC = sync.OnceValue(func() uint64 { return measureTSC(readTSC, time.Now) })

// tscReading is the counter's value at a time.
type tscReading struct {
	ticks uint64
	at    time.Time
	blur  time.Duration // how far at may be from when the counter was read
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

// takeTSC reads the counter between two readings of the clock. The pair that is closest together was not interrupted.
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

// tscArgument is what a guest's kernel is told of the counter's frequency under TCG.
func tscArgument(khz uint64) string {
	if khz == 0 || runtime.GOARCH != "amd64" {
		return ""
	}
	return fmt.Sprintf(" tsc_early_khz=%d", khz)
}
