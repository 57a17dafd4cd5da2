// Package pgcluster runs a private PostgreSQL server out of a directory: the one inside `coppice dev` and the ones
// that tests use. It finds the installed programs, makes the cluster, starts the server under a user that is not
// root, waits until it answers, and ends it. It does not know databases, roles or schemas.
//
// The server listens on a unix socket in a directory that only its user (and root) may enter, and nowhere else; that
// directory is the whole of its access control.
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
// The server is a direct child of the owner and gets a signal when the owner dies, whatever the cause: a fast, clean
// shutdown for a durable cluster, an immediate one otherwise. Where even that failed, the next Start finds processes
// of the old server by their working directory, ends them, and only then removes a stale postmaster.pid: PostgreSQL
// guards against two servers on one directory with that file, and against a recycled process id it can only refuse
// to start.
//
// # Directories that the server's user cannot reach
//
// Run by root, the server drops to the user postgres, which cannot enter, say, /root. In that case the server gets a
// mount namespace of its own, in which the closed directory is covered by an empty one and the cluster's two
// directories are bound at their own paths; nobody else's view or permissions change.
package pgcluster
