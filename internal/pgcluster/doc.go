// Package pgcluster runs a private PostgreSQL server out of a directory, for `coppice dev` and for
// tests. It finds the installed programs, makes the cluster, starts the server under a user that is
// not root, waits until it answers, and ends it. It does not know databases, roles or schemas.
//
// The server listens only on a unix socket in a directory that only its user (and root) may enter.
// That directory is its only access control.
//
// # What is in the directory
//
//	lock           held (flock) by the process that owns the cluster; the kernel frees it however that process ends
//	data/          the cluster; data.new/ while it is being made, renamed when complete
//	run/           the socket
//	postgres.log   what the server printed; postgres.log.1 is the one before
//
// # How it ends
//
// The server is a direct child of the owner and gets a signal when the owner dies, whatever the
// cause: a fast, clean shutdown for a durable cluster, an immediate one otherwise. If even that
// failed, the next Start finds processes of the old server by their working directory and ends
// them. Only then does it remove a stale postmaster.pid. PostgreSQL uses that file to prevent two
// servers on one directory; if another process has the recorded process id, PostgreSQL can only
// refuse to start.
//
// # Directories that the server's user cannot reach
//
// When root starts it, the server changes to the user postgres, which cannot enter, for example,
// /root. In that case the server gets its own mount namespace. There, an empty directory covers the
// closed one, and the cluster's two directories are bound at their own paths. Nobody else's view or
// permissions change.
package pgcluster
