// Package host is the egress process of a host. It serves the sandboxes that the host's runner
// hands to it, each by the sockets that the runner has opened in the sandbox's namespace. It keeps
// the records of their flows until the runner has reported them to the controller. For a sandbox
// that may reach everything it only answers questions for names.
//
// The process runs as its own user without privileges, because it parses what guests send. It and
// its tunnels go on when its runner ends. When the process itself ends, its sockets close, and
// nothing leaves a sandbox until the runner has opened new sockets and handed them to the next
// process.
//
// # What is kept
//
// Each flow is a record in the spool. The process appends it before any of the flow is sent, and
// again when the flow has ended. Record numbers never go back. A record that a runner has
// acknowledged is removed. When the spool is too full, the process refuses flows: first those of a
// sandbox that has used its share, then those of all sandboxes except the ones with little in the
// spool. The spool outlives the process: the next process delivers what was not acknowledged, and
// ends flows that were under way.
//
// Denied flows cost a guest nothing. So a sandbox gets a record for each of a few in a minute.
// Tallies count the others, one for each host, port and reason, and one for everything beyond their
// number. A tally keeps its count in a file, so no flow is missing when the process is killed. It
// becomes a record when its minute is over.
//
// # What stops nothing
//
// A record has a bound (core.Flow.Clipped), and a batch is limited by its encoded size. Records of
// an older version may be longer: they are reported with clipped texts. Records that cannot be read
// are moved to a file beside the spool. Stats counts both. A message that is too long gets an
// error, on the same connection.
package host
