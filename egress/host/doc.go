// Package host is the egress process of a host: it serves the sandboxes that the host's runner hands to it, each by the sockets that the
// runner has opened in the sandbox's namespace, and keeps what they sent until the runner has told it to the controller.
//
// It is a process of its own, under a user of its own without privileges, because it parses what guests send. It goes on when its runner
// ends, and tunnels through it with it. When it ends itself its sockets are closed, and nothing leaves a sandbox until the runner has opened
// others and handed them to its successor.
//
// # What is kept
//
// Each flow is a record in the spool, appended before anything of it is sent and again when it has ended. Records have numbers that never
// go back. What a runner has acknowledged is removed; when there is too much that nobody fetches, flows are refused: first those of a sandbox
// that has its share, then those of all but the sandboxes that have little in the spool. The spool outlives the process: its successor gives what
// was not acknowledged, and ends flows that were under way.
//
// Flows that were denied cost a guest nothing. A sandbox gets a record for each of a few in a minute; the others are counted in tallies, one for
// each host, port and reason, and one for whatever is beyond their number. A tally has a place in a file for its count, so that none is lost
// when the process is killed, and becomes a record when its minute is over.
//
// # What stops nothing
//
// A record has a bound (core.Flow.Clipped), and a batch is cut by what it takes when it is encoded. What an older version has left that is longer
// is told with its texts clipped, or, as what cannot be read, set aside in a file beside the spool; both are counted in Stats. A message that is too
// long is answered with an error, on the same connection.
package host
