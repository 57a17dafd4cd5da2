// Package flows owns the journal of egress: one record for each request or connection that a sandbox
// sent or tried to send.
//
// Runners report the flows of their sandboxes. A Journal checks these records, because guests chose
// much of their text, and inserts them as rows. Each workspace and each project has a quota of rows
// for each kind of flow. Beyond the quota, the database only counts flows by minute, host and port.
// The journal also lists effects: the flows on a path of the tree that may have changed something
// outside. It removes flows that are older than the configuration allows.
//
// The package uses the database through Store and Tx only. Its owner calls MakePartitions, FoldCounts
// and RemoveOldCounts regularly, on one controller of the cluster.
package flows
