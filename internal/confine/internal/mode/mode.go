// Package mode has one switch of package confine that only its test helper can reach.
package mode

import "sync/atomic"

// WithoutRoot lets a user other than root start helpers, without namespaces and without their own user. Only package
// confinetest sets it. That package links package testing, and no shipped program may link package testing.
var WithoutRoot atomic.Bool
