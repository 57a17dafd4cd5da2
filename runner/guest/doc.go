// Package guest is the host's side of the guest protocol: it dials the agent of a sandbox, speaks guestapi with it, checks
// the evidence of a reseal, and lets public requests through to the guest and nothing else.
//
// The agent lives in the attacker's machine. Whatever it says is bounded in size and time, its texts are clipped to
// printable ASCII before anyone sees them, and nothing but "this sandbox is not ready" is ever concluded from it.
package guest
