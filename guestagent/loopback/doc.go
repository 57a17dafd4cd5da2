// Package loopback connects a host to programs of the workload that listen on the loopback of the
// guest. It opens no port of its own.
package loopback
