// Package e2e proves the whole system: `coppice dev` as a process of its own, real VMs, PostgreSQL, namespaces, and nothing but
// the public REST API in between. It holds tests only.
//
// Most tests share one server, which is started by the first that needs it and stopped, with a search for what it left, after the
// last. Tests that kill something have a server of their own. A checkpoint with the test program guestprobe in it is made once;
// tests fork it.
//
// The long sweeps run with -long (make test-long): what they do more of is said where they are.
package e2e
