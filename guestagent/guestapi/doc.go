// Package guestapi is the protocol between a runner and the agent inside a guest: JSON over
// HTTP/1.1 over one connection. Each request has its own stream of a multiplexer (yamux; the host
// is its client). The package has the messages, the paths and the handshake of the connection. It
// has no code that runs a command or changes a machine.
//
// # Connection
//
// The connection is a byte stream that outlives what both ends know of it. The virtio-serial port
// of a restored clone is the port of its parent, in the middle of whatever the parent was sending.
// So neither end assumes anything about the bytes that are already in the pipe.
//
// Besides data, only records are on the wire. A record has 25 bytes:
//
//	magic    8 bytes  C0 'c' 'p' 'p' 'g' 'u' 's' 1A
//	version  1 byte   the sender's protocol version
//	nonce   16 bytes  12 random bytes that name one dial of the host, then a 4-byte counter
//
// From the host, a record is a hello. From the guest, it is the answer to the hello with that
// nonce. An answer whose nonce is all zeros answers no hello: it says "an agent has just started
// here and knows of no session".
//
// Data is stuffed: wherever the first seven bytes of the magic occur in it, the sender adds one
// zero byte after them and the receiver removes it. So the magic never occurs inside data (even if
// a file contains it), and a receiver can distinguish a record from data at any byte of the stream,
// even in the middle of a frame. The first byte of the magic is in no UTF-8 text and occurs once in
// the magic, so the check costs one scan for one byte.
//
//	host                                        guest
//	hello(dial, 1) ─────────────────────────▶   in whatever state: end the session, write nothing of it any more
//	hello(dial, 2) ────(50 ms later)────────▶   ◀── answer(dial, 2): only the last of the hellos it had at hand
//	answer of this dial seen: no more hellos
//	mux data ───────────────────────────────▶   mux data
//
// The host discards everything until it has seen an answer of its own dial. The guest discards
// everything until it has seen a hello. Several hellos of one dial may be queued before the guest
// reads any (a guest that boots, or is restored). A hello of the same dial that arrives before the
// first byte of data is answered again and otherwise ignored. The host skips the answers of its own
// dial that arrive before the guest's first byte of data. The host sends no hello once it has sent
// data, so a hello after data always belongs to a new connection, and ends the session. A handshake
// never leaves anything for the multiplexer to read, and one round trip is enough. If a stream was
// cut in the middle of a record, of data or of a stuffed sequence, the receiver understands it from
// the next magic on, because it looks for the magic inside records too.
//
// # Frozen, quarantined, released
//
// The agent is in one of three states. From a quiesce on it is frozen: the workload's cgroup is
// frozen. A capture taken then is frozen in every clone. Two ways lead on. The captured machine
// goes on by reseed and then release with its present generation. A clone goes on by reseal with a
// new generation, which makes it quarantined, and then release with the new generation. A
// generation that was used before is refused. Public requests wait while the agent is frozen, and
// are refused while it is quarantined.
//
// A provisional reseal leads back to frozen. From there, only a reseal with another new generation
// leads on.
//
// # Output
//
// The bytes of each output stream of a session are numbered from 0. The agent keeps the last 1 MiB.
// While somebody follows a stream, or shortly after the start, the process waits for the reader as
// it would at a pipe, so a follower that keeps reading gets every byte. Otherwise the oldest bytes
// are dropped, and a reader who asks for them sees this (Coppice-Offset is where the answer starts;
// the trailer Coppice-Truncated is "true" if bytes were dropped in between).
//
// # Versions
//
// An agent inside an old checkpoint stays as old as the checkpoint. So fields and routes are only
// added, never renamed and never given another meaning, and unknown fields are ignored.
// testdata/v<N> keeps an exchange of each version for ever. What an agent can beyond the first agents
// of its version, it says in Health.Features; a host asks before it relies on one of them (Needs).
//
//	1  2026-11-21  first version
package guestapi
