// Package guesttest has what the tests of several parts of the agent need: a workload without a guest,
// and a client of routes over plain HTTP.
package guesttest
