// Package sidecar starts processes that go on when the starting process ends, and speaks to them over a unix socket
// that keeps message boundaries: requests and answers in turn, each as JSON with descriptors. A
// Supervisor keeps such a process running for the code that uses it.
package sidecar
