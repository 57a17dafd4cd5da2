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
// go back. What a runner has acknowledged is removed; when there is too much that nobody fetches, flows are refused. The spool outlives the
// process: its successor gives what was not acknowledged, and ends flows that were under way.
package host
