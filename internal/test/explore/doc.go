// Package explore holds the explorer of interleavings, which is a test: two controllers over one PostgreSQL and a runner with fake
// machines, of which one side stops in the middle of an operation while the others go on, and then goes on itself. Afterwards
// nothing that was promised may be broken. Each such run is a schedule. Schedules have numbers, and a schedule that fails runs
// again by its number: go test ./internal/test/explore -run TestExplore -explore.schedule N.
package explore
