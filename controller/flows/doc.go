// Package flows owns the journal of egress: one record for each request or connection that a sandbox
// sent or tried to send.
//
// Runners report the flows of their sandboxes. A Journal checks these records, because guests chose
// much of their text, and inserts them as rows. Each workspace and each project has a quota of rows
// for each kind of flow; the database counts further flows by minute, host and port. The journal
// also answers which flows of a path in the tree may have changed something outside (effects), and
// it removes what is older than the configuration says.
//
// The package knows the database by Store and Tx only. Its owner calls MakePartitions, FoldCounts
// and RemoveOldCounts regularly, on one controller of the cluster.
package flows
