// Package guest is the host's side of the guest protocol. It dials the agent of a sandbox, speaks
// guestapi with it, and checks the evidence of a reseal. It lets public requests through to the
// guest and nothing else.
//
// The agent lives in the attacker's machine. Everything that it says is bounded in size and time,
// and its texts are clipped to printable ASCII before anyone sees them. The only conclusion that
// the package ever draws from them is "this sandbox is not ready".
package guest
