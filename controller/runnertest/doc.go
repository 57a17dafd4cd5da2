// Package runnertest is a runner without virtual machines. It serves api/runnerapi with the
// behaviour of the real runner (states, idempotence by id, capacity, refusals, latency, heartbeats)
// and has a guest of package fakeguest for each sandbox. So tests can check and load the controller
// without a VMM. A sandbox costs two kilobytes, and a thousand parallel forks are easy.
//
// It cannot show anything about machines. Tests of machines run the real runner.
package runnertest
