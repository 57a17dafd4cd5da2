// Package testpool runs a whole installation on this machine for tests, benchmarks and the demo:
// PostgreSQL, a server that speaks S3, a controller, and runners. Each runner is a separate process
// in its own network namespace, as on another host.
//
// The traffic between a runner and the store passes a relay that counts bytes. The package needs
// root.
package testpool
