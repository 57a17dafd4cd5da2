// Package fakeguest simulates a guest and its agent: it answers the routes of guestapi out of a State, which is a plain
// value. A fake machine keeps the State in its RAM, so that checkpoints contain it. A fake runner keeps one for each
// sandbox and copies it for forks.
//
// The workload is a list of sessions. Their programs are the words in programs.go. Files are in memory. Users exist by
// name only: everybody may do everything. A guest has no processes, ports or terminals.
package fakeguest
