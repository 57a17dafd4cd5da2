// Package runnertest is a runner without virtual machines: it serves api/runnerapi with the behaviour of the real one
// (states, idempotence by id, capacity, refusals, latency, heartbeats) and a small guest in memory, so that the controller
// can be tested and loaded without a VMM. Sandboxes cost a few hundred bytes; a thousand parallel forks are nothing to it.
//
// What it cannot show is anything about machines. Tests of those run the real runner.
package runnertest
