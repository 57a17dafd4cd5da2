// Package e2e tests the whole system: `coppice dev` as a separate process, real VMs, PostgreSQL,
// namespaces, and only the public REST API in between. It contains only tests.
//
// Most tests share one server. The first test that needs it starts it. After the last test it is
// stopped, and the package searches for anything that it left behind. Tests that kill something
// have their own server. A checkpoint with the test program guestprobe in it is made once, and
// tests fork it.
//
// The long sweeps run with -long (make test-long). The comments of these tests say what they do in
// addition.
package e2e
