// Package testpool runs a whole installation on this machine for tests, benchmarks and the demo: PostgreSQL, a server that speaks S3, a controller,
// and runners that are processes of their own, each in a network namespace of its own as on another host.
//
// What a runner and the store say to one another passes a relay that counts bytes. It needs root.
package testpool
