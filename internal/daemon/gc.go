package daemon

import "runtime/debug"

// RelaxGC lets a server's heap grow to five times what lives in it, instead of twice, before it is collected, unless GOGC
// is set to something else than twice. A few MiB live in an idle controller, and it takes about three to answer with a thousand checkpoints: collected as
// usual, every other such request paid for it (ADR 22).
func RelaxGC() {
	const usual, relaxed = 100, 400
	if was := debug.SetGCPercent(relaxed); was != usual {
		debug.SetGCPercent(was)
	}
}
