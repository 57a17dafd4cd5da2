// Package guestapi is the protocol between a runner and the agent inside a guest: JSON over HTTP/1.1, each request
// on its own stream of a multiplexer (yamux; the host is its client), over one connection. It holds the messages, the
// paths and the handshake of the connection, and nothing that runs a command or changes a machine.
//
// # Connection
//
// The connection is a byte stream that outlives both ends' idea of it: a virtio-serial port of a restored clone is
// the port its parent had, in the middle of whatever the parent was saying. So nothing is assumed of what is already
// in the pipe, in either direction.
//
// A record is the only thing besides data that is ever on the wire, 25 bytes:
//
//	magic    8 bytes  C0 'c' 'p' 'p' 'g' 'u' 's' 1A
//	version  1 byte   the sender's protocol version
//	nonce   16 bytes  12 random bytes that name one dial of the host, then a 4-byte counter
//
// From the host a record is a hello, from the guest it is the answer to the hello of that nonce. An answer whose nonce
// is all zero answers nothing: it says "an agent has just started here and knows of no session".
//
// Data is stuffed: wherever the first seven bytes of the magic occur in it, the sender adds one zero byte after them and
// the receiver takes it away. The magic therefore never occurs inside data (a file that holds it included), and a
// receiver can tell a record from data at any byte of the stream, in the middle of a frame too. The first byte of the
// magic is in no UTF-8 text and occurs once in the magic, so that the check costs one scan for one byte.
//
//	host                                        guest
//	hello(dial, 1) ─────────────────────────▶   in whatever state: end the session, write nothing of it any more
//	hello(dial, 2) ────(50 ms later)────────▶   ◀── answer(dial, 2): only the last of the hellos it had at hand
//	answer of this dial seen: no more hellos
//	mux data ───────────────────────────────▶   mux data
//
// Until it has seen an answer of its own dial, the host discards everything. Until it has seen a hello, the guest does.
// Several hellos of one dial may be queued before the guest reads any (a guest that boots, or is restored). A hello of the
// same dial that arrives before the first byte of data is answered again and otherwise ignored; the host skips the answers
// of its own dial that come before the guest's first byte of data. The host sends no hello once it has sent data, so a
// hello after data is always that of a new connection, and ends the session. Nothing of a handshake is ever left for the
// multiplexer to read, and one round trip is enough. A stream that was cut in the middle of a record, of data or of a
// stuffed sequence is understood from the next magic on, because the receiver looks for the magic inside records too.
//
// # Frozen, quarantined, released
//
// The agent is in one of three states. It is frozen from a quiesce on: the workload's cgroup is frozen. A capture taken
// then is frozen in every clone. From there two ways lead on: reseed and then release with the generation it has (the
// machine that was captured goes on), or reseal with a new generation, which makes it quarantined, and then release with
// that one (a clone). A generation that was used before is refused. Public requests wait while frozen, and are refused
// while quarantined.
//
// # Output
//
// Each output stream of a session is numbered by byte from 0. The last 1 MiB of it is kept. While somebody follows a
// stream, or shortly after the start, the process waits for the reader as it would at a pipe, so that a follower that keeps
// reading gets every byte; otherwise the oldest bytes are dropped, and a reader who asks for them is told (Coppice-Offset
// is where the answer starts; the trailer Coppice-Truncated is "true" when bytes were dropped in between).
//
// # Versions
//
// An agent inside an old checkpoint stays as old as the checkpoint, so fields and routes are only added, never renamed or
// given another meaning, and unknown fields are ignored. testdata/v<N> keeps an exchange of each version for ever.
//
//	1  2026-11-21  first version
package guestapi
