package daemon

import "runtime/debug"

// RelaxGC lets a server's heap grow to five times what lives in it, instead of twice, before it is collected, unless that was
// set from outside, in gogc. A few MiB live in an idle controller, and it takes about three to answer with a thousand checkpoints: collected as
// usual, every other such request paid for it (ADR 22).
func RelaxGC(gogc string) {
	if gogc == "" {
		debug.SetGCPercent(400)
	}
}
